"""Video file bytes -> the sound beside the frames, on the frames' clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.audio import MAX_CHANNELS, SAMPLE_RATE, SAMPLE_RATES, resampled
from minicpmo_triton.media.container import VideoLimits, opened
from minicpmo_triton.media.video import ROUNDING

#: A gap in the sound's timestamps of this part of a second is silence, not rounding.
_GAP = Fraction(1, 10)


def decode_sound(
    field: str, data: bytes, start: Fraction, seconds: Fraction, limits: VideoLimits
) -> NDArray[np.float32]:
    """The first sound track from ``start`` on: mono at 16 kHz, float32 [samples].

    Ends with the sound, or with the last second that the picture's ``seconds`` begin; empty without a
    track. Silence stands where the track begins late or has gaps. Raises :class:`InvalidArgument` for
    ``field`` when the track is corrupt, of an unsupported layout, or holds values that are not finite.
    """
    with opened(field, data, limits) as container:
        if not container.streams.audio:
            return np.empty(0, np.float32)
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise InvalidArgument(field, "has sound of an unsupported codec")
        frames = container.decode(stream)
        first = next(frames, None)
        if first is None:
            return np.empty(0, np.float32)
        rate, num_seconds = first.sample_rate, max(math.ceil(seconds - ROUNDING), 1)
        if rate not in SAMPLE_RATES or first.layout.nb_channels > MAX_CHANNELS:
            raise InvalidArgument(
                field, f"has sound of {rate} Hz in {first.layout.nb_channels} channels, which is unsupported"
            )
        tick = stream.time_base or Fraction(1, rate)
        blocks = (
            (None if frame.pts is None else frame.pts * tick - start, samples)
            for frame, samples in _mono(field, first, frames)
        )
        placed = _placed(field, blocks, rate, num_seconds * rate)
        return resampled(placed, rate)[: num_seconds * SAMPLE_RATE]


def _mono(
    field: str, first: av.AudioFrame, rest: Iterator[av.AudioFrame]
) -> Iterator[tuple[av.AudioFrame, NDArray[np.float32]]]:
    """Each frame and the mean of its channels, float32 [samples]."""
    form = (first.format.name, first.layout.name, first.sample_rate)
    converter = av.AudioResampler(format="fltp", layout=first.layout, rate=first.sample_rate)
    for frame in itertools.chain([first], rest):
        if (frame.format.name, frame.layout.name, frame.sample_rate) != form:
            raise InvalidArgument(field, "has sound whose rate or channels change on the way")
        for converted in converter.resample(frame):
            yield frame, converted.to_ndarray().mean(axis=0)


def _placed(
    field: str, blocks: Iterable[tuple[Fraction | None, NDArray[np.float32]]], rate: int, num_samples: int
) -> Iterator[NDArray[np.float32]]:
    """Blocks of (seconds from the start, samples) on one time line of at most ``num_samples``."""
    position = 0
    for at, samples in blocks:
        gap = 0 if at is None else round(at * rate) - position
        if position == 0 and gap < 0:
            samples = samples[-gap:]
        elif gap > (rate * _GAP if position else 0):
            silence = np.zeros(min(gap, num_samples - position), np.float32)
            position += len(silence)
            yield silence
        if not np.isfinite(samples).all():
            raise InvalidArgument(field, "has sound that holds values that are not finite numbers")
        yield samples[: num_samples - position]
        position += len(samples)
        if position >= num_samples:
            return
