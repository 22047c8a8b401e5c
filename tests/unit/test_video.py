"""Videos are sampled where asked, whatever the container, and refused when they are not whole."""

from __future__ import annotations

import io
import itertools
import math
import socket
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media import video
from minicpmo_triton.media.container import VideoLimits
from minicpmo_triton.media.video import Sampling, Video, decode_video, interleave, sample_times
from minicpmo_triton.media.video_sound import decode_sound
from tests.unit.video_files import SOUND_RATE, colour, flat, seconds_video, tone, video_file

LIMITS = VideoLimits(max_seconds=60, max_pixels=1_000_000, num_threads=2)
CONTAINERS = [
    ("mp4", "libx264", "aac"),
    ("mp4", "mpeg4", "aac"),
    ("mov", "mjpeg", "pcm_s16le"),
    ("matroska", "libx264", "pcm_s16le"),
    ("webm", "libvpx-vp9", "libopus"),
    ("avi", "mpeg4", "pcm_s16le"),
    ("mpegts", "libx264", "aac"),
    ("flv", "libx264", "aac"),
]


def sampled(
    data: bytes, fps: Any = 1, max_frames: int = 64, limits: VideoLimits = LIMITS
) -> Video[Image.Image]:
    return decode_video(
        "video[0]", data, Sampling(Fraction(str(fps)), max_frames), limits, lambda image: image
    )


def sound_of(data: bytes, start: Fraction, seconds: Fraction) -> np.ndarray:
    return decode_sound("video[0]", data, start, seconds, LIMITS)


def mean(image: Image.Image) -> np.ndarray:
    return np.asarray(image).reshape(-1, 3).mean(axis=0)


def seconds_shown(frames: tuple[Image.Image, ...]) -> list[int]:
    """The second (of ten) whose colour each frame has."""
    colours = np.array([colour(second) for second in range(10)])
    found = []
    for frame in frames:
        distance = np.abs(colours - mean(frame)).max(axis=1)
        assert distance.min() < 9, mean(frame)
        found.append(int(distance.argmin()))
    return found


def main_hz(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * 16_000 / len(samples))


@pytest.mark.parametrize(("container", "codec", "sound_codec"), CONTAINERS)
def test_a_frame_a_second_in_every_container(container: str, codec: str, sound_codec: str) -> None:
    data = seconds_video(5, True, container=container, codec=codec, sound_codec=sound_codec)
    result = sampled(data)
    assert result.times == (0, 1, 2, 3, 4)
    assert seconds_shown(result.frames) == [0, 1, 2, 3, 4]
    assert {frame.size for frame in result.frames} == {(64, 48)}
    assert abs(result.seconds - 5) < Fraction(1, 50)
    sound = sound_of(data, result.start, result.seconds)
    assert sound.dtype == np.float32
    assert abs(len(sound) - 80_000) < 1_600
    for second in range(5):
        # Off the borders, where a codec's window sees the neighbour.
        piece = sound[second * 16_000 + 1_600 : (second + 1) * 16_000 - 1_600]
        assert abs(main_hz(piece) - (300 + 200 * second)) < 3
        assert 0.25 < np.sqrt((piece**2).mean()) < 0.31  # 0.4 / sqrt(2)


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected"),
    [
        (1, 64, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, 64, [second for second in range(10) for _ in range(2)]),
        (0.5, 64, [0, 2, 4, 6, 8]),
        (0.3, 64, [0, 3, 6]),  # the fourth would be at 10 s, where the video has ended
        (1, 5, [0, 2, 4, 6, 8]),
        (1, 3, [0, 3, 6]),
        (10, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (1, 1, [0]),
        (1e-300, 64, [0]),
    ],
)
def test_sampling(fps: float, max_frames: int, expected: list[int]) -> None:
    # Frames depend on later ones, and key frames are rarer than samples.
    result = sampled(seconds_video(10, gop_size=37, bf="3"), fps, max_frames)
    assert seconds_shown(result.frames) == expected


def test_more_samples_than_frames_show_a_frame_again() -> None:
    taken: list[Image.Image] = []

    def take(image: Image.Image) -> int:
        taken.append(image)
        return len(taken) - 1

    data = seconds_video(2, fps=2)
    result = decode_video("video[0]", data, Sampling(Fraction(10), 64), LIMITS, take)
    assert result.frames == tuple(i // 5 for i in range(20))
    assert len(taken) == 4


def test_frames_of_uneven_length_are_those_on_screen() -> None:
    """A slide show: the second slide comes at 0.95 s, the third at 4.05 s and ends at once."""
    slides = [(Fraction(0), 0), (Fraction(95, 100), 1), (Fraction(405, 100), 2)]
    data = video_file([(at, flat(colour(second))) for at, second in slides], container="matroska")
    assert seconds_shown(sampled(data).frames)[:5] == [0, 1, 1, 1, 1]
    assert seconds_shown(sampled(data, fps=20, max_frames=84).frames)[-2:] == [2, 2]


@pytest.mark.parametrize("rotation", [90, 180, 270])
@pytest.mark.parametrize("codec", ["libx264", "mjpeg"])
def test_frames_are_upright(rotation: int, codec: str) -> None:
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:24, :32] = (250, 10, 10)  # red in the top left corner
    data = video_file(
        [(Fraction(i, 10), pixels) for i in range(5)], rotation=rotation, codec=codec, container="mov"
    )
    (frame,) = sampled(data).frames
    turned = np.rot90(pixels, rotation // 90)  # anticlockwise, as FFmpeg counts
    assert frame.size == (turned.shape[1], turned.shape[0])
    np.testing.assert_allclose(np.asarray(frame)[5::38, 5::38], turned[5::38, 5::38], atol=20)


def test_sound_that_begins_late_is_preceded_by_silence() -> None:
    frames = [(Fraction(i, 10), flat(colour(0))) for i in range(40)]
    data = video_file(
        frames, tone(3), container="matroska", sound_codec="pcm_s16le", sound_start=Fraction(3, 2)
    )
    result = sampled(data)
    sound = sound_of(data, result.start, result.seconds)
    assert len(sound) == 40_000
    assert np.abs(sound[:23_900]).max() < 1e-3
    assert abs(main_hz(sound[24_200:39_800]) - 900) < 3


def test_sound_ends_with_the_last_second_of_the_picture() -> None:
    frames = [(Fraction(i, 10), flat(colour(0))) for i in range(15)]
    data = video_file(frames, np.concatenate([tone(0)] * 5), container="matroska", sound_codec="pcm_s16le")
    result = sampled(data)
    assert result.seconds == Fraction(3, 2)
    assert len(sound_of(data, result.start, result.seconds)) == 32_000


def test_sound_before_the_first_frame_is_left_out() -> None:
    frames = [(Fraction(1) + Fraction(i, 10), flat(colour(0))) for i in range(20)]
    sound = np.concatenate([tone(0), tone(1), tone(2)])
    data = video_file(frames, sound, container="matroska", sound_codec="pcm_s16le")
    result = sampled(data)
    assert result.start == 1
    assert abs(main_hz(sound_of(data, result.start, result.seconds)[:16_000]) - 500) < 3


def test_a_video_without_sound_gives_none() -> None:
    data = seconds_video(2)
    assert len(sound_of(data, Fraction(0), Fraction(2))) == 0


def test_a_sparse_sample_decodes_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    data = seconds_video(10, gop_size=10)
    num_decoded = []
    decoded = video._decoded

    def counting(*args: Any) -> Any:
        for frame in decoded(*args):
            num_decoded.append(1)
            yield frame

    monkeypatch.setattr(video, "_decoded", counting)
    assert seconds_shown(sampled(data, max_frames=2).frames) == [0, 5]
    assert len(num_decoded) < 15


def test_runs_reach_back_to_a_key_frame_and_over_it_for_frames_shown_before_it() -> None:
    #           key          key          key
    packet_pts = [0, 3, 1, 2, 6, 4, 5, 7, 10, 8, 9]
    timeline = video._Timeline(sorted(packet_pts), 11, packet_pts, [0, 4, 8])
    assert timeline.runs([0]) == [range(1)]
    assert timeline.runs([2]) == [range(4)]
    assert timeline.runs([7]) == [range(4, 8)]
    assert timeline.runs([5]) == [range(7)]  # leans on frame 3, before its key frame
    assert timeline.runs([0, 7]) == [range(1), range(4, 8)]
    assert timeline.runs([1, 5]) == [range(7)]
    assert timeline.runs([3, 7, 10]) == [range(2), range(4, 9)]
    assert timeline.shown_at(Fraction(7, 2)) == 3
    assert timeline.shown_at(Fraction(99)) == 10


@pytest.mark.parametrize(
    ("seconds", "fps", "num_frames"),
    [("10", 1, 10), ("10.001", 1, 10), ("10.01", 1, 10), ("10.1", 1, 11), ("9.999", 1, 10), ("0.01", 1, 1),
     ("10", 30, 300), ("10.001", 30, 300), ("10.03", 30, 301), ("10", 1000, 512)],
)  # fmt: skip
def test_rounded_lengths_give_no_frame_more(seconds: str, fps: int, num_frames: int) -> None:
    assert len(sample_times(Fraction(seconds), Sampling(Fraction(fps), 512))) == num_frames


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.fractions(0, 5_000, max_denominator=90_000),
    fps=st.fractions(Fraction(1, 1_000), 1_000, max_denominator=1_000),
    max_frames=st.integers(1, 512),
)
def test_sample_times(seconds: Fraction, fps: Fraction, max_frames: int) -> None:
    times = sample_times(seconds, Sampling(fps, max_frames))
    assert times[0] == 0
    slack = min(Fraction(1, 50), 1 / (2 * fps))
    assert len(times) == min(max(math.ceil((seconds - slack) * fps), 1), max_frames)
    assert times[-1] < seconds or len(times) == 1
    assert len({later - earlier for earlier, later in itertools.pairwise(times)}) <= 1
    if len(times) < max_frames and len(times) > 1:
        assert times[1] == 1 / fps
    order = interleave(times, 7)
    assert [index for is_sound, index in order if is_sound] == list(range(7))
    assert [index for is_sound, index in order if not is_sound] == list(range(len(times)))
    for place, (is_sound, index) in enumerate(order):
        if is_sound:
            assert all(times[i] < index + 1 for sound, i in order[:place] if not sound)
            assert all(times[i] >= index + 1 for sound, i in order[place:] if not sound)


@pytest.mark.parametrize(("container", "codec", "sound_codec"), CONTAINERS[:6])
@pytest.mark.parametrize("part", [0.97, 0.6, 0.2])
def test_a_truncated_file_is_refused(container: str, codec: str, sound_codec: str, part: float) -> None:
    data = seconds_video(3, True, container=container, codec=codec, sound_codec=sound_codec)
    with pytest.raises(InvalidArgument, match=r"video\[3\]: is (malformed, )?truncated") as caught:
        decode_video(
            "video[3]", data[: int(len(data) * part)], Sampling(Fraction(1), 64), LIMITS, lambda image: image
        )
    assert caught.value.field == "video[3]"


def test_a_file_of_unknown_length_is_whole() -> None:
    """As a browser records it: the segment's size and the duration are left open."""
    data = seconds_video(3, container="webm", codec="libvpx-vp9", live="1")
    segment = data.index(b"\x18\x53\x80\x67") + 4
    assert data[segment] == 0x01  # a size of eight bytes
    data = data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 :]
    assert seconds_shown(sampled(data).frames) == [0, 1, 2]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00\x00\x1cftypisom",
        b"\x1a\x45\xdf\xa3",
        b"RIFF\x04\x00\x00\x00AVI ",
        b"no video" * 500,
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile 'other.mp4'\n",
    ],
)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"video\[0\]: is .*(truncated|supported)"):
        sampled(data)


def test_a_play_list_opens_neither_connections_nor_files(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(seconds_video(1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}/a.ts", str(tmp_path / "a.mp4")]
        for url in urls:
            for text in (
                f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{url}\n#EXT-X-ENDLIST\n",
                f"ffconcat version 1.0\nfile '{url}'\n",
            ):
                with pytest.raises(InvalidArgument):
                    sampled(text.encode())
        with pytest.raises(TimeoutError):
            server.accept()


def test_noise_in_a_file_costs_an_invalid_argument_at_most() -> None:
    data = seconds_video(2, True)
    random = np.random.default_rng(0)
    num_refused = 0
    for _ in range(60):
        spoilt = np.frombuffer(data, np.uint8).copy()
        spoilt[random.integers(0, len(data), 40)] = random.integers(0, 256, 40)
        try:
            result = sampled(spoilt.tobytes())
            sound_of(spoilt.tobytes(), result.start, result.seconds)
        except InvalidArgument:
            num_refused += 1
    assert num_refused > 10


def test_limits_are_held_before_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr(video, "_decoded", fails)
    data = seconds_video(4)
    with pytest.raises(InvalidArgument, match="lasts longer than 3 s"):
        sampled(data, limits=VideoLimits(3, 10_000))
    with pytest.raises(InvalidArgument, match="64x48 pixels; at most 3071"):
        sampled(data, limits=VideoLimits(4, 3_071))
    with pytest.raises(InvalidArgument, match="one side may be at most 200 times"):
        sampled(video_file([(Fraction(0), flat((9, 9, 9), (3_232, 16)))], codec="mjpeg", container="mov"))
    monkeypatch.setattr(video, "_MAX_FRAME_RATE", 5)
    with pytest.raises(InvalidArgument, match="more than 20 frames"):
        sampled(data, limits=VideoLimits(4, 10_000))


def test_a_length_that_no_header_tells_is_limited() -> None:
    data = seconds_video(4, container="webm", codec="libvpx-vp9", live="1")
    with pytest.raises(InvalidArgument, match="lasts longer than 3 s"):
        sampled(data, limits=VideoLimits(3, 10_000))


def test_a_file_of_sound_alone_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        track = output.add_stream("aac", rate=SOUND_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(0)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = SOUND_RATE, 0
        output.mux(track.encode(frame))
        output.mux(track.encode(None))
    with pytest.raises(InvalidArgument, match="holds no picture"):
        sampled(file.getvalue())


def test_containers_are_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    av_open = av.open

    def recorded(*args: Any, **kwargs: Any) -> Any:
        opened.append(av_open(*args, **kwargs))
        return opened[-1]

    data = seconds_video(2, True)
    monkeypatch.setattr(av, "open", recorded)

    def fails(image: Image.Image) -> None:
        raise RuntimeError("taken")

    sampled(data)
    sound_of(data, Fraction(0), Fraction(1))  # ends before the track does
    with pytest.raises(RuntimeError, match="taken"):
        decode_video("video[0]", data, Sampling(Fraction(1), 64), LIMITS, fails)
    with pytest.raises(InvalidArgument):
        sampled(data, limits=VideoLimits(1, 10_000))
    assert len(opened) == 4
    for container in opened:
        with pytest.raises(AssertionError, match="not open"):
            list(container.demux())
