"""Small videos whose every frame and every second of sound is known, written with PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

SOUND_RATE = 48_000


def colour(second: int) -> tuple[int, int, int]:
    """Far enough from that of every other second of ten to survive compression."""
    return (24 * (second % 10) + 16, 240 - 24 * (second % 10), 60 + 120 * (second % 2))


def tone(second: int, num_samples: int = SOUND_RATE, rate: int = SOUND_RATE) -> np.ndarray:
    """A sine of 300 Hz in the first second, 200 Hz more in each that follows."""
    hz = 300 + 200 * second
    return (0.4 * np.sin(2 * np.pi * hz * np.arange(num_samples) / rate)).astype(np.float32)


def video_file(
    frames: Iterable[tuple[Fraction, np.ndarray]],
    sound: np.ndarray | None = None,
    container: str = "mp4",
    codec: str = "libx264",
    sound_codec: str = "aac",
    sound_start: Fraction = Fraction(0),
    rotation: int = 0,
    gop_size: int = 12,
    rate: int = 10,
    **options: str,
) -> bytes:
    """A video of (seconds, RGB [H, W, 3]) and mono ``sound`` at :data:`SOUND_RATE`."""
    file = io.BytesIO()
    frames = list(frames)
    with av.open(file, "w", format=container) as output:
        picture = output.add_stream(codec, rate=rate, options=options)
        picture.height, picture.width = frames[0][1].shape[:2]
        picture.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        picture.gop_size = gop_size
        tick = Fraction(1, rate if container == "avi" else 1000)  # AVI has a fixed rate
        picture.time_base = picture.codec_context.time_base = tick
        if rotation:
            picture.set_display_rotation(rotation)
        track = None
        if sound is not None:
            track = output.add_stream(sound_codec, rate=SOUND_RATE, layout="mono")
        for at, pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.time_base = tick
            frame.pts = round(at / tick)
            output.mux(picture.encode(frame))
        output.mux(picture.encode(None))
        if track is not None and sound is not None:
            _write_sound(output, track, sound, sound_start)
    return file.getvalue()


def _write_sound(output: Any, track: Any, sound: np.ndarray, start: Fraction) -> None:
    resampler = av.AudioResampler(format=track.codec_context.format, layout="mono", rate=SOUND_RATE)
    block = 4800
    for begin in range(0, len(sound), block):
        frame = av.AudioFrame.from_ndarray(sound[None, begin : begin + block], format="flt", layout="mono")
        frame.sample_rate = SOUND_RATE
        frame.time_base = Fraction(1, SOUND_RATE)
        frame.pts = round(start * SOUND_RATE) + begin
        for converted in resampler.resample(frame):
            output.mux(track.encode(converted))
    output.mux(track.encode(None))


def flat(rgb: Sequence[int], size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """A frame of one colour, ``size`` as (width, height)."""
    return np.broadcast_to(np.array(rgb, np.uint8), (size[1], size[0], 3))


def seconds_video(num_seconds: int, with_sound: bool = False, fps: int = 10, **options: Any) -> bytes:
    """A colour and, if asked for, a tone for each second."""
    size = options.pop("size", (64, 48))
    frames = [(Fraction(i, fps), flat(colour(i // fps), size)) for i in range(num_seconds * fps)]
    sound = np.concatenate([tone(second) for second in range(num_seconds)]) if with_sound else None
    return video_file(frames, sound, rate=fps, **options)
