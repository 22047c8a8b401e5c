"""Requests -> the arrays that the encoders and the language model take."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.errors import CheckpointError, InvalidArgument, MiniCPMOError
from minicpmo_triton.media.audio import (
    POOL_STEP,
    SAMPLE_RATE,
    decode_audio,
    log_mel,
    log_mel_chunks,
    num_audio_tokens,
    num_mel_frames,
)
from minicpmo_triton.media.container import VideoLimits
from minicpmo_triton.media.image import decode_and_slice
from minicpmo_triton.media.slicing import ImagePatches, compile_kernels, slice_image
from minicpmo_triton.media.source import media_bytes
from minicpmo_triton.media.video import Sampling, decode_video, interleave
from minicpmo_triton.media.video_sound import decode_sound
from minicpmo_triton.prompt import PromptBuilder
from minicpmo_triton.request import (
    MAX_FRAMES,
    AudioPart,
    ChatRequest,
    FramePart,
    ImagePart,
    MediaParameters,
    RawRequest,
    SoundPart,
    TextPart,
    VideoPart,
    parse_request,
)
from minicpmo_triton.schema import MEL_BINS, PATCH_SIZE, PATCH_VALUES
from minicpmo_triton.tokenizer import read_json

_Scalar = TypeVar("_Scalar", bound=np.generic)

#: Of one video's decoder; several videos are decoded side by side.
MAX_VIDEO_THREADS = 4

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preprocessed:
    """One request's tensors, named as in :data:`schema.PREPROCESS`; zero rows where a kind is absent."""

    prompt: str
    input_ids: NDArray[np.int32]  # [T]
    image_positions: NDArray[np.int32]  # [N]
    audio_positions: NDArray[np.int32]  # [N]
    patches: NDArray[np.uint8]  # [P, 588]
    grid_sizes: NDArray[np.int32]  # [S, 2]
    mel: NDArray[np.float32]  # [F, 80]
    mel_lengths: NDArray[np.int32]  # [C]


@dataclass(frozen=True)
class CheckpointMedia:
    """What ``preprocessor_config.json`` says of media."""

    max_slice_nums: int = 9
    scale_resolution: int = 448
    use_image_id: bool = True
    slice_mode: bool = True
    image_feature_size: int = 64
    patch_size: int = PATCH_SIZE
    audio_pool_step: int = POOL_STEP

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: Path) -> CheckpointMedia:
        """Raises :class:`CheckpointError` for a value of the wrong type or one that is not supported."""
        path = checkpoint_dir / "preprocessor_config.json"
        config = read_json(path)
        values = {name: config[name] for name in cls.__annotations__ if name in config}
        for name, value in values.items():
            if type(value) is not type(getattr(cls, name)) or value < 0:
                raise CheckpointError(f"{path}: {name} is {value!r}")
        media = cls(**values)
        for name, supported in (("patch_size", PATCH_SIZE), ("audio_pool_step", POOL_STEP)):
            if getattr(media, name) != supported:
                raise CheckpointError(f"{path}: {name} is {getattr(media, name)}; {supported} is supported")
        return media


@dataclass(frozen=True)
class _Clip:
    mel: NDArray[np.float32]  # [F, 80]
    lengths: NDArray[np.int32]  # [C]


@dataclass(frozen=True)
class _Media:
    """What one part of a message, an image, clip or video, brings into the tensors, in order.

    ``video_parts`` stand in the place of a video.
    """

    images: Sequence[ImagePatches] = ()
    clips: Sequence[_Clip] = ()
    video_parts: Sequence[FramePart | SoundPart] | None = None


@dataclass(frozen=True)
class _Pending:
    """A parsed request whose media are being decoded, in the order of the conversation."""

    request: ChatRequest
    media: list[Future[_Media]]

    def cancel(self) -> None:
        for future in self.media:
            future.cancel()


class Preprocessor:
    """Turns requests into tensors. The media of all requests of a call are decoded on one thread pool.

    Safe to call from several threads. Raises :class:`CheckpointError` when a tokenizer or processor
    file is missing or not supported.
    """

    def __init__(self, checkpoint_dir: Path, parameters: PreprocessParameters) -> None:
        self._parameters = parameters
        self._media = CheckpointMedia.from_checkpoint(checkpoint_dir)
        self._prompts = PromptBuilder.from_checkpoint(checkpoint_dir, self._media.image_feature_size)
        num_threads = parameters.num_threads or len(os.sched_getaffinity(0))
        self._video_threads = min(num_threads, MAX_VIDEO_THREADS)
        # The pools are the parallelism; torch's own threads beside them would only contend.
        single = partial(torch.set_num_threads, 1)
        self._pool = ThreadPoolExecutor(num_threads, "preprocess", initializer=single)
        # A task of the first pool may wait for one of these, which wait for none: no deadlock.
        self._piece_pool = ThreadPoolExecutor(num_threads, "piece", initializer=single)
        compile_kernels()

    def close(self) -> None:
        """Stop the threads; media not yet begun are given up."""
        self._pool.shutdown(cancel_futures=True)
        self._piece_pool.shutdown()

    def process(self, raw: RawRequest) -> Preprocessed:
        """One request; raises the :class:`MiniCPMOError` it fails with."""
        (result,) = self.process_all([raw])
        if isinstance(result, MiniCPMOError):
            raise result
        return result

    def process_all(self, raws: Sequence[RawRequest]) -> list[Preprocessed | MiniCPMOError]:
        """Every request's tensors or the error it fails with, in order; never raises for a request."""
        started = [self._guarded_start(raw) for raw in raws]
        return [self._guarded_finish(pending) for pending in started]

    def _guarded_start(self, raw: RawRequest) -> _Pending | MiniCPMOError:
        try:
            return self._start(raw)
        except Exception as error:
            return _as_error(error)

    def _guarded_finish(self, pending: _Pending | MiniCPMOError) -> Preprocessed | MiniCPMOError:
        if isinstance(pending, MiniCPMOError):
            return pending
        try:
            return self._finish(pending)
        except Exception as error:
            pending.cancel()
            return _as_error(error)

    def _start(self, raw: RawRequest) -> _Pending:
        for name, elements in (("image", raw.images), ("audio", raw.audios), ("video", raw.videos)):
            self._check_count(name, len(elements))
        request = parse_request(raw)
        self._check_text("messages" if raw.text_input is None else "text_input", request)
        self._check_count("messages", max(len(request.images), len(request.audios), len(request.videos)))
        _check_frames(len(request.videos), request.parameters.max_frames)
        return _Pending(
            request,
            [
                self._pool.submit(self._decode, part, request.parameters)
                for part in request.parts
                if isinstance(part, ImagePart | AudioPart | VideoPart)
            ],
        )

    def _check_text(self, field: str, request: ChatRequest) -> None:
        limit = self._parameters.max_text_characters
        length = sum(len(part.text) for part in request.parts if isinstance(part, TextPart))
        if length > limit:
            raise InvalidArgument(field, f"has {length} characters of text; at most {limit} are allowed")

    def _check_count(self, field: str, num_items: int) -> None:
        limit = self._parameters.max_media_items
        if num_items > limit:
            raise InvalidArgument(field, f"{num_items} media items of one kind; at most {limit} are allowed")

    def _decode(self, part: ImagePart | AudioPart | VideoPart, parameters: MediaParameters) -> _Media:
        data = media_bytes(part.field, part.element, self._parameters.max_media_bytes)
        if isinstance(part, ImagePart):
            return _Media(images=[self._image(part, data, parameters.max_slice_nums)])
        if isinstance(part, AudioPart):
            samples = decode_audio(part.field, data, self._parameters.max_audio_seconds)
            return _Media(clips=[_Clip(*log_mel_chunks(part.field, samples, self._piece_pool))])
        return self._video(part.field, data, parameters)

    def _image(self, part: ImagePart, data: bytes, max_slice_nums: int | None) -> ImagePatches:
        default = self._media.max_slice_nums if self._media.slice_mode else 1
        return decode_and_slice(
            part.field,
            data,
            self._parameters.max_image_pixels,
            part.max_slice_nums or max_slice_nums or default,
            self._media.scale_resolution,
            self._piece_pool,
        )

    def _video(self, field: str, data: bytes, parameters: MediaParameters) -> _Media:
        limits = VideoLimits(
            self._parameters.max_video_seconds, self._parameters.max_video_pixels, self._video_threads
        )
        # By its decimal digits: 0.1 frames a second are one in exactly 10 s.
        sampling = Sampling(Fraction(str(parameters.video_fps)), parameters.max_frames)
        take = partial(
            slice_image,
            max_slice_nums=1,
            scale_resolution=self._media.scale_resolution,
            pool=self._piece_pool,
        )
        video = decode_video(field, data, sampling, limits, take)
        clips: list[_Clip] = []
        if parameters.omni_mode:
            clips = _second_clips(decode_sound(field, data, video.start, video.seconds, limits))
        order = interleave(video.times, len(clips))
        return _Media(video.frames, clips, [SoundPart() if sound else FramePart() for sound, _ in order])

    def _finish(self, pending: _Pending) -> Preprocessed:
        media = [future.result() for future in pending.media]
        images = [image for item in media for image in item.images]
        clips = [clip for item in media for clip in item.clips]
        numbered = pending.request.parameters.use_image_id
        prompt = self._prompts.build(
            pending.request.with_videos(i.video_parts for i in media if i.video_parts is not None),
            [(image.rows, image.columns) for image in images],
            [sum(num_audio_tokens(int(length)) for length in clip.lengths) for clip in clips],
            self._media.use_image_id if numbered is None else numbered,
        )
        return Preprocessed(
            prompt.text,
            prompt.input_ids,
            prompt.image_positions,
            prompt.audio_positions,
            _concatenate([image.patches for image in images], np.empty((0, PATCH_VALUES), np.uint8)),
            _concatenate([image.grid_sizes for image in images], np.empty((0, 2), np.int32)),
            _concatenate([clip.mel for clip in clips], np.empty((0, MEL_BINS), np.float32)),
            _concatenate([clip.lengths for clip in clips], np.empty(0, np.int32)),
        )


def _check_frames(num_videos: int, max_frames: int) -> None:
    if num_videos * max_frames > MAX_FRAMES:
        raise InvalidArgument(
            "media_parameters.max_frames",
            f"{num_videos} videos of up to {max_frames} frames each; at most {MAX_FRAMES} frames a request",
        )


def _second_clips(samples: NDArray[np.float32]) -> list[_Clip]:
    """A clip of each second of a video's sound; a last one that is too short for a token is left out."""
    pieces = [samples[start : start + SAMPLE_RATE] for start in range(0, len(samples), SAMPLE_RATE)]
    usable = [piece for piece in pieces if num_audio_tokens(num_mel_frames(len(piece))) > 0]
    return [_Clip(log_mel(piece), np.array([num_mel_frames(len(piece))], np.int32)) for piece in usable]


def _concatenate(arrays: list[NDArray[_Scalar]], empty: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """One array after another; a single one is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else empty


def _as_error(error: Exception) -> MiniCPMOError:
    """The error a client may see: the log gets the traceback of what nobody foresaw."""
    if isinstance(error, MiniCPMOError):
        return error
    _logger.error("preprocess failed unexpectedly", exc_info=error)
    return MiniCPMOError(f"preprocessing failed: {type(error).__name__}; the server's log has the details")
