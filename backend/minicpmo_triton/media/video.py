"""Video file bytes -> frames sampled evenly in time.

The picture's packets give the time of every frame before any is decoded, so a sample of a long video
decodes only the runs of packets that it needs. Times count from the first frame shown.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

import av
from av.container import InputContainer
from av.stream import Disposition
from PIL import Image

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.container import VideoLimits, check_video_is_whole, opened
from minicpmo_triton.media.image import MAX_ASPECT_RATIO

#: Frames of a video of the greatest length, per second of it.
_MAX_FRAME_RATE = 120
#: Seconds that a length may be over by: time stamps are rounded to 1/1000 s, and 10 s of 29.97 frames a
#: second last 10.01 s.
ROUNDING = Fraction(1, 50)
#: Degrees anticlockwise that a frame is to be turned by, which is also how Pillow counts.
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}

T = TypeVar("T")


@dataclass(frozen=True)
class Sampling:
    """``fps`` frames a second from the first on; evenly over the video where that is over ``max_frames``."""

    fps: Fraction
    max_frames: int


@dataclass(frozen=True)
class Video(Generic[T]):
    """What ``take`` made of each sampled frame, the frame's time, the video's length and its start.

    ``times`` and ``seconds`` count from the first frame, which is ``start`` on the file's own clock.
    """

    frames: tuple[T, ...]
    times: tuple[Fraction, ...]
    seconds: Fraction
    start: Fraction


def sample_times(seconds: Fraction, sampling: Sampling) -> tuple[Fraction, ...]:
    """Seconds from the start of the sampled moments: at least one, at most ``max_frames``.

    The next moment would be no earlier than the end, give or take what containers round.
    """
    rounding = min(ROUNDING, 1 / (2 * sampling.fps))
    num_frames = max(math.ceil((seconds - rounding) * sampling.fps), 1)
    step = 1 / sampling.fps
    if num_frames > sampling.max_frames:
        num_frames = sampling.max_frames
        step = seconds / num_frames
    return tuple(i * step for i in range(num_frames))


def interleave(times: Sequence[Fraction], num_pieces: int) -> list[tuple[bool, int]]:
    """The order of frames (False, index) and pieces of sound (True, index), of one second each.

    A second's frames come first, then its sound.
    """
    units = [(math.floor(time), False, i) for i, time in enumerate(times)]
    units += [(second, True, second) for second in range(num_pieces)]
    return [(is_sound, index) for _, is_sound, index in sorted(units)]


def decode_video(
    field: str, data: bytes, sampling: Sampling, limits: VideoLimits, take: Callable[[Image.Image], T]
) -> Video[T]:
    """Decode the frames on screen at :func:`sample_times`; ``take`` gets each as an upright RGB image.

    One frame is held at a time. A frame that stays on screen for several samples is taken once and given
    again. Raises :class:`InvalidArgument` for ``field`` when ``data`` is no video of a supported format,
    is truncated or corrupt, or is over a limit; sizes are known before a frame is decoded.
    """
    check_video_is_whole(field, data)
    with opened(field, data, limits) as container:
        stream = _picture(field, container, limits)
        packets, timeline = _read_packets(field, container, stream, limits)
        tick = stream.time_base or Fraction(1, 1000)
        start, end = timeline.pts[0], timeline.end
        seconds = (end - start) * tick
        if seconds > limits.max_seconds:
            raise _too_long(field, limits)
        times = sample_times(seconds, sampling)
        wanted = [timeline.shown_at(start + time / tick) for time in times]
        decoded = _decoded(stream.codec_context, packets, timeline.runs(sorted(set(wanted))))
        taken = {pts: take(_to_image(field, frame)) for pts, frame in _select(decoded, sorted(set(wanted)))}
        if not taken:
            raise InvalidArgument(field, "holds no frame that can be decoded")
        return Video(tuple(taken[pts] for pts in wanted), times, seconds, start * tick)


def _picture(field: str, container: InputContainer, limits: VideoLimits) -> av.VideoStream:
    """The first picture track, checked, with its decoder bound in size and threads."""
    streams = [s for s in container.streams.video if Disposition.attached_pic not in s.disposition]
    if not streams:
        raise InvalidArgument(field, "holds no picture")
    stream = streams[0]
    context = stream.codec_context
    if context is None:
        raise InvalidArgument(field, "has a picture of an unsupported codec")
    _check_size(field, context.width, context.height, limits.max_pixels)
    announced = [
        (stream.duration or 0) * (stream.time_base or 0),
        Fraction(container.duration or 0, av.time_base),
    ]
    if max(announced) > limits.max_seconds:
        raise _too_long(field, limits)
    context.options = {"max_pixels": str(limits.max_pixels)}  # the header may promise less than comes
    context.thread_type = "AUTO"
    context.thread_count = limits.num_threads
    return stream


def _check_size(field: str, width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise InvalidArgument(field, "has no picture size")
    if width * height > max_pixels:
        raise InvalidArgument(
            field, f"has frames of {width}x{height} pixels; at most {max_pixels} are allowed"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidArgument(
            field,
            f"has frames of {width}x{height} pixels; "
            f"one side may be at most {MAX_ASPECT_RATIO} times the other",
        )


def _too_long(field: str, limits: VideoLimits) -> InvalidArgument:
    return InvalidArgument(field, f"lasts longer than {limits.max_seconds} s")


@dataclass(frozen=True)
class _Timeline:
    """When frames are shown, in ticks, ascending; and how packets depend on one another.

    ``packet_pts`` and ``keys`` (indices of packets that a decoder can start with, 0 always among them)
    are in the order of decoding.
    """

    pts: list[int]
    end: int
    packet_pts: list[int]
    keys: list[int]

    def shown_at(self, tick: Fraction) -> int:
        """The last frame shown at or before ``tick``."""
        return self.pts[max(bisect_right(self.pts, tick) - 1, 0)]

    def runs(self, wanted: Iterable[int]) -> list[range]:
        """The fewest runs of packets, each from a key frame on, that hold the frames ``wanted``."""
        index_of = {pts: i for i, pts in enumerate(self.packet_pts)}
        runs: list[range] = []
        for index in sorted(index_of[pts] for pts in wanted):
            key = bisect_right(self.keys, index) - 1
            # Shown before its key frame, a frame may also lean on what comes before that.
            if key > 0 and self.packet_pts[index] < self.packet_pts[self.keys[key]]:
                key -= 1
            run = range(self.keys[key], index + 1)
            if runs and run.start <= runs[-1].stop:
                run = range(runs.pop().start, run.stop)
            runs.append(run)
        return runs


def _read_packets(
    field: str, container: InputContainer, stream: av.VideoStream, limits: VideoLimits
) -> tuple[list[av.Packet[av.VideoStream]], _Timeline]:
    packets: list[av.Packet[av.VideoStream]] = []
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise InvalidArgument(field, "is truncated or corrupt: a frame is incomplete")
        if packet.size:
            packets.append(packet)
        if len(packets) > limits.max_seconds * _MAX_FRAME_RATE:
            raise InvalidArgument(field, f"has more than {len(packets) - 1} frames")
    stamps = [packet.dts if packet.pts is None else packet.pts for packet in packets]
    pts = [i if stamp is None else stamp for i, stamp in enumerate(stamps)]
    # What an edit list cuts away is decoded, for others may depend on it, but never shown.
    shown = sorted({stamp for stamp, packet in zip(pts, packets, strict=True) if not packet.is_discard})
    if not shown:
        raise InvalidArgument(field, "holds no frames")
    average = (shown[-1] - shown[0]) // max(len(shown) - 1, 1)
    last = packets[pts.index(shown[-1])].duration or average
    keys = sorted({0, *(i for i, packet in enumerate(packets) if packet.is_keyframe)})
    return packets, _Timeline(shown, shown[-1] + last, pts, keys)


def _decoded(
    context: av.VideoCodecContext, packets: Sequence[av.Packet[av.VideoStream]], runs: Iterable[range]
) -> Iterator[av.VideoFrame]:
    """The frames of each run in the order they are shown."""
    for run in runs:
        for index in run:
            yield from context.decode(packets[index])
        yield from context.decode(None)
        context.flush_buffers()


def _select(frames: Iterable[av.VideoFrame], wanted: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
    """For each of ``wanted``, ascending, the last frame shown at or before it, or else the first."""
    shown: av.VideoFrame | None = None
    num_found = 0
    for frame in frames:
        stamp = frame.dts if frame.pts is None else frame.pts
        before = len(wanted) if stamp is None else bisect_left(wanted, stamp)
        while shown is not None and num_found < before:
            yield wanted[num_found], shown
            num_found += 1
        shown = frame
    while shown is not None and num_found < len(wanted):
        yield wanted[num_found], shown
        num_found += 1


def _to_image(field: str, frame: av.VideoFrame) -> Image.Image:
    if frame.is_corrupt:
        raise InvalidArgument(field, "is truncated or corrupt: a frame lacks others that it depends on")
    _check_size(field, frame.width, frame.height, frame.width * frame.height)  # may change in mid-stream
    image: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)
