"""Audio file bytes -> log-mel frames, as Whisper's feature extractor computes them.

A recording is cut into chunks of 30 s. The reference pads each chunk with silence to 30 s, takes the
dynamic range over all of it and then keeps the frames of the real length; here only the frames that
touch real samples are computed, which gives the same values: silent frames are the floor and never
the maximum.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import lru_cache

import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.schema import MAX_MEL_FRAMES, MEL_BINS

SAMPLE_RATE = 16_000
HOP = 160
WINDOW = 400
CHUNK_SAMPLES = MAX_MEL_FRAMES * HOP  # 30 s
POOL_STEP = 5

_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
SAMPLE_RATES = range(1_000, 768_001)
MAX_CHANNELS = 64
_BLOCK_VALUES = 1 << 20
_UNKNOWN_FRAMES = 1 << 48  # more than any file has; a streamed FLAC's header claims the like
_STREAMED_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # what writers to a pipe leave in a WAV header


def decode_audio(field: str, data: bytes, max_seconds: int) -> NDArray[np.float32]:
    """Decode to mono samples at 16 kHz, float32 [samples].

    Memory is bound by ``max_seconds``, whatever the header claims. Raises :class:`InvalidArgument` for
    ``field`` when ``data`` is no audio of a supported format, is truncated, empty or too long, or holds
    values that are not finite.
    """
    _check_riff_is_whole(field, data)
    _check_ogg_is_whole(field, data)
    try:
        file = _ForwardFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise InvalidArgument(
            field, f"is malformed or not audio of a supported format ({', '.join(_FORMATS)})"
        ) from error
    with file:
        _check_header(field, file, max_seconds)
        try:
            return resampled(_mono_blocks(field, file, max_seconds), file.samplerate)
        except soundfile.LibsndfileError as error:
            raise InvalidArgument(field, f"is truncated or corrupt: {error.error_string}") from error


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """Read from start to end. The base class seeks behind each block, to where it is already; some
    streams cannot seek, and others lose their place."""

    def seekable(self) -> bool:
        return False


def _check_riff_is_whole(field: str, data: bytes) -> None:
    """libsndfile silently takes what is left of a truncated WAV, so its chunk sizes are checked here."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    position = 12
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        position += 8 + size + size % 2
        if name == b"data":
            if position - size % 2 > len(data) and size not in _STREAMED_SIZES:
                raise InvalidArgument(
                    field,
                    f"is truncated: its header announces {size} bytes of samples, "
                    f"{len(data) - (position - size - size % 2)} are there",
                )
            return


def _check_ogg_is_whole(field: str, data: bytes) -> None:
    """libsndfile drops a last Ogg page that is cut off. A missing end-of-stream mark is no error."""
    if data[:4] != b"OggS":
        return
    # A page: 26 bytes, the number of its segments, that many bytes of segment sizes, the segments.
    sizes_at = data.rfind(b"OggS") + 27
    segment_sizes = data[sizes_at : sizes_at + data[sizes_at - 1]] if sizes_at <= len(data) else b""
    if sizes_at > len(data) or sizes_at + data[sizes_at - 1] + sum(segment_sizes) > len(data):
        raise InvalidArgument(field, "is truncated: its last Ogg page is incomplete")


def _check_header(field: str, file: soundfile.SoundFile, max_seconds: int) -> None:
    if file.format not in _FORMATS:
        raise InvalidArgument(field, f"is {file.format} audio; {', '.join(_FORMATS)} are supported")
    if file.samplerate not in SAMPLE_RATES:
        raise InvalidArgument(field, f"has an unsupported sample rate of {file.samplerate} Hz")
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise InvalidArgument(field, f"has {file.channels} channels; at most {MAX_CHANNELS} are supported")
    if max_seconds * file.samplerate < file.frames < _UNKNOWN_FRAMES:
        raise _too_long(field, max_seconds)


def _too_long(field: str, max_seconds: int) -> InvalidArgument:
    return InvalidArgument(field, f"lasts longer than {max_seconds} s")


def resampled(blocks: Iterator[NDArray[np.float32]], rate: int) -> NDArray[np.float32]:
    """Mono blocks at 16 kHz as one array; whole blocks at the original rate are never held together."""
    if rate == SAMPLE_RATE:
        return np.concatenate([np.empty(0, np.float32), *blocks])
    resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
    resampled: list[NDArray[np.float32]] = []
    num_frames = 0
    for block in blocks:
        resampled.append(resampler.resample_chunk(block))
        num_frames += len(block)
    # The resampler rounds the length to the nearest; the reference's loader rounds it up, with a zero.
    num_samples = math.ceil(num_frames * SAMPLE_RATE / rate)
    resampled += [resampler.resample_chunk(np.empty(0, np.float32), last=True), np.zeros(1, np.float32)]
    return np.concatenate(resampled)[:num_samples]


def _mono_blocks(field: str, file: soundfile.SoundFile, max_seconds: int) -> Iterator[NDArray[np.float32]]:
    num_block_frames = _BLOCK_VALUES // file.channels
    num_frames = 0
    while len(block := file.read(num_block_frames, dtype="float32", always_2d=True)):
        num_frames += len(block)
        if num_frames > max_seconds * file.samplerate:
            raise _too_long(field, max_seconds)
        if not np.isfinite(block).all():
            raise InvalidArgument(field, "holds samples that are not finite numbers")
        yield block[:, 0] if file.channels == 1 else block.mean(axis=1)
    if num_frames == 0:
        raise InvalidArgument(field, "holds no samples")
    if num_frames < file.frames < _UNKNOWN_FRAMES:
        raise InvalidArgument(
            field, f"is truncated: its header announces {file.frames} sample frames, {num_frames} are there"
        )


#: Frames whose spectra are made at a time: they stay in a core's cache.
_PIECE_FRAMES = 750


def num_mel_frames(num_samples: int) -> int:
    """Mel frames of a chunk of at most 30 s."""
    return -(-num_samples // HOP)


def num_audio_tokens(num_frames: int) -> int:
    """Embedding rows that the audio encoder yields for a chunk of ``num_frames`` mel frames."""
    num_positions = (num_frames - 1) // 2 + 1  # convolution of stride 2
    return (num_positions - POOL_STEP) // POOL_STEP + 1  # average pool


def log_mel_chunks(
    field: str, samples: NDArray[np.float32], pool: Executor | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-mel frames of every 30 s chunk: float32 [F, 80] and int32 [C] frames per chunk.

    A last chunk under 9 frames (0.08 s) gives no embedding row and is left out: the encoder wants a row
    from every chunk, and the rows of the others are what the reference counts for the whole recording.
    Raises :class:`InvalidArgument` for ``field`` when the whole recording is as short as that.
    """
    chunks = [samples[start : start + CHUNK_SAMPLES] for start in range(0, len(samples), CHUNK_SAMPLES)]
    chunks = [chunk for chunk in chunks if num_audio_tokens(num_mel_frames(len(chunk))) > 0]
    if not chunks:
        raise InvalidArgument(field, f"lasts {len(samples) / SAMPLE_RATE:.3f} s, too short for one token")
    lengths = np.array([num_mel_frames(len(chunk)) for chunk in chunks], np.int32)
    mel = np.concatenate([log_mel(chunk, pool) for chunk in chunks])
    if not np.isfinite(mel).all():
        raise InvalidArgument(field, "is so loud that its power is no finite number")
    return mel, lengths


def log_mel(samples: NDArray[np.float32], pool: Executor | None = None) -> NDArray[np.float32]:
    """Whisper's log-mel of one chunk of more than 200 and at most 480000 samples: float32 [frames, 80].

    ``frames`` is the number of samples over 160, rounded up. In the reference's order of float32
    operations, so that even bins near the floor agree with it. The work runs in pieces on ``pool``, whose
    tasks must not call this function in turn; the result does not depend on it.
    """
    window, filters = _window_and_filters()
    num_frames = num_mel_frames(len(samples))
    frames = torch.from_numpy(_padded(samples)).unfold(0, WINDOW, HOP)  # [frames + 2, 400] at most

    def mel_power(piece: torch.Tensor) -> torch.Tensor:
        power: torch.Tensor = torch.fft.rfft(piece * window).abs() ** 2  # [N, 201]
        return filters @ power.T  # [80, N]

    run = pool.map if pool else map
    pieces = frames.tensor_split(math.ceil(len(frames) / _PIECE_FRAMES))
    log_power = torch.cat(list(run(mel_power, pieces)), dim=1).clamp_(min=1e-10).log10_()  # [80, frames + 2]
    floored = torch.maximum(log_power, log_power.max() - 8.0)
    return np.ascontiguousarray(((floored[:, :num_frames] + 4.0) / 4.0).numpy().T)


def _padded(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The samples under every frame that touches one: up to two frames more than are kept.

    Frames are centred, with the signal reflected at its start and, for a chunk of full length, end.
    """
    half = WINDOW // 2
    num_frames = min(num_mel_frames(len(samples)) + 2, MAX_MEL_FRAMES)
    padded = np.zeros((num_frames - 1) * HOP + WINDOW, np.float32)
    padded[:half] = samples[half:0:-1]
    end = min(half + len(samples), len(padded))
    padded[half:end] = samples[: end - half]
    num_reflected = len(padded) - half - CHUNK_SAMPLES
    if num_reflected > 0:
        padded[-num_reflected:] = padded[-num_reflected - 2 : -2 * num_reflected - 2 : -1]
    return padded


@lru_cache(maxsize=1)
def _window_and_filters() -> tuple[torch.Tensor, torch.Tensor]:
    """Hann window [400] and Slaney's mel filters [80, 201] from 0 to 8 kHz, each of unit area."""
    bin_hz = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    edges_hz = _mel_to_hz(np.linspace(0.0, _hz_to_mel(SAMPLE_RATE / 2), MEL_BINS + 2))
    rising = (bin_hz - edges_hz[:-2, None]) / np.diff(edges_hz)[:-1, None]
    falling = (edges_hz[2:, None] - bin_hz) / np.diff(edges_hz)[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges_hz[2:] - edges_hz[:-2]))[:, None]
    return torch.hann_window(WINDOW), torch.from_numpy(filters.astype(np.float32))


# Slaney's mel scale: linear up to 1 kHz (15 mels), then 27 mels for each factor of 6.4.
_MEL_HZ, _BREAK_HZ, _BREAK_MEL, _LOG_STEP = 200.0 / 3.0, 1000.0, 15.0, math.log(6.4) / 27.0


def _hz_to_mel(hz: float) -> float:
    return hz / _MEL_HZ if hz < _BREAK_HZ else _BREAK_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < _BREAK_MEL, mel * _MEL_HZ, _BREAK_HZ * np.exp((mel - _BREAK_MEL) * _LOG_STEP))
