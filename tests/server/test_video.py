"""Videos through the whole pipeline: frames and sound count as input tokens, a broken file is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minicpmo_triton.launcher import TritonServer
from tests.unit.video_files import seconds_video

from .raw import Answer, Value, stream_whole

SAMPLING = json.dumps({"temperature": 0, "max_tokens": 4, "ignore_eos": True})
#: A frame is one slice of 64 rows between two markers; a second of sound is 10 rows between two.
MIN_FRAME_TOKENS = 66
MIN_SOUND_TOKENS = 12


@pytest.fixture(scope="module")
def video() -> bytes:
    return seconds_video(3, with_sound=True)


def ask(server: TritonServer, video: bytes, **media: Any) -> Answer:
    values: dict[str, Value] = {
        "text_input": "What happens?",
        "video": [video],
        "media_parameters": json.dumps(media),
        "sampling_parameters": SAMPLING,
    }
    return stream_whole(server.grpc_url, "minicpmo", values)


def num_input_tokens(answer: Answer) -> int:
    assert (answer.errors, answer.num_final) == ([], 1)
    return int(answer.responses[0]["num_input_tokens"][0])


def test_every_frame_counts_in_the_input_tokens(server: TritonServer, video: bytes) -> None:
    one, two, three, spread = (
        num_input_tokens(ask(server, video, **media))
        for media in ({"max_frames": 1}, {"max_frames": 2}, {}, {"video_fps": 2})
    )
    frame = two - one
    assert MIN_FRAME_TOKENS <= frame <= MIN_FRAME_TOKENS + 2  # a newline may stand between
    assert three - two == frame
    assert spread - three == 3 * frame


def test_omni_mode_brings_the_sound_of_each_second(server: TritonServer, video: bytes) -> None:
    with_sound = num_input_tokens(ask(server, video, omni_mode=True))
    silent = num_input_tokens(ask(server, seconds_video(3), omni_mode=True))
    assert with_sound - silent >= 3 * MIN_SOUND_TOKENS


def test_a_truncated_video_is_refused(server: TritonServer, video: bytes) -> None:
    answer = ask(server, video[: len(video) // 2])
    assert answer.responses == []
    [message] = answer.errors
    assert "video[0]" in message
    assert "Traceback" not in message
    assert num_input_tokens(ask(server, video)) > 0  # the server is well
