"""Requests -> the arrays that the encoders and the language model take."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.errors import CheckpointError, InvalidArgument, MiniCPMOError
from minicpmo_triton.media.audio import POOL_STEP, decode_audio, log_mel_chunks, num_audio_tokens
from minicpmo_triton.media.image import ImagePatches, decode_image, slice_image
from minicpmo_triton.media.source import media_bytes
from minicpmo_triton.prompt import PromptBuilder
from minicpmo_triton.request import AudioPart, ChatRequest, ImagePart, RawRequest, parse_request
from minicpmo_triton.schema import MEL_BINS, PATCH_SIZE, PATCH_VALUES
from minicpmo_triton.tokenizer import read_json

_Scalar = TypeVar("_Scalar", bound=np.generic)

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
class _Pending:
    """A parsed request whose media are being decoded."""

    request: ChatRequest
    images: list[Future[ImagePatches]]
    audios: list[Future[_Clip]]

    def cancel(self) -> None:
        futures: list[Future[Any]] = [*self.images, *self.audios]
        for future in futures:
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
        # The pool is the parallelism; torch's own threads beside it would only contend.
        self._pool = ThreadPoolExecutor(
            num_threads, "preprocess", initializer=torch.set_num_threads, initargs=(1,)
        )
        # A task of the first pool may wait for one of these, which wait for none: no deadlock.
        self._resize_pool = ThreadPoolExecutor(num_threads, "resize")

    def close(self) -> None:
        """Stop the threads; media not yet begun are given up."""
        self._pool.shutdown(cancel_futures=True)
        self._resize_pool.shutdown()

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
        self._check_count("image", len(raw.images))
        self._check_count("audio", len(raw.audios))
        request = parse_request(raw)
        images, audios = request.images, request.audios
        self._check_count("messages", max(len(images), len(audios)))
        max_slices = request.parameters.max_slice_nums
        if max_slices is None:
            max_slices = self._media.max_slice_nums if self._media.slice_mode else 1
        return _Pending(
            request,
            [self._pool.submit(self._patches, part, max_slices) for part in images],
            [self._pool.submit(self._clip, part) for part in audios],
        )

    def _check_count(self, field: str, num_items: int) -> None:
        limit = self._parameters.max_media_items
        if num_items > limit:
            raise InvalidArgument(field, f"{num_items} media items of one kind; at most {limit} are allowed")

    def _patches(self, part: ImagePart, max_slices: int) -> ImagePatches:
        data = media_bytes(part.field, part.element, self._parameters.max_media_bytes)
        image = decode_image(part.field, data, self._parameters.max_image_pixels)
        return slice_image(image, max_slices, self._media.scale_resolution, self._resize_pool)

    def _clip(self, part: AudioPart) -> _Clip:
        data = media_bytes(part.field, part.element, self._parameters.max_media_bytes)
        samples = decode_audio(part.field, data, self._parameters.max_audio_seconds)
        return _Clip(*log_mel_chunks(part.field, samples))

    def _finish(self, pending: _Pending) -> Preprocessed:
        images = [future.result() for future in pending.images]
        clips = [future.result() for future in pending.audios]
        numbered = pending.request.parameters.use_image_id
        prompt = self._prompts.build(
            pending.request,
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
