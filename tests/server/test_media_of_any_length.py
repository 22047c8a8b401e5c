"""Recordings of any length, videos and conversations, over gRPC and HTTP: their tokens are all there."""

from __future__ import annotations

import base64
import http.client
import io
import json
from typing import Any

import numpy as np
import pytest
import soundfile

from minicpmo_triton.launcher import TritonServer
from tests.unit.video_files import seconds_video

from .raw import Value, stream_whole

SAMPLE_RATE = 16_000
ONE_TOKEN = json.dumps({"temperature": 0, "max_tokens": 1, "ignore_eos": True})
SECONDS = (0.1, 0.3, 29.99, 30.00, 30.01, 61, 300)


def recording(seconds: float) -> bytes:
    samples = 0.1 * np.sin(np.arange(round(seconds * SAMPLE_RATE)) * 0.05)
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="FLAC")
    return file.getvalue()


def num_tokens(seconds: float) -> int:
    """As published: frames of 10 ms, a convolution of stride 2, a mean over five."""
    num_frames = -(-round(seconds * SAMPLE_RATE) // 160)
    return (((num_frames - 1) // 2 + 1) - 5) // 5 + 1


def over_grpc(server: TritonServer, values: dict[str, Value]) -> int:
    answer = stream_whole(server.grpc_url, "minicpmo", {**values, "sampling_parameters": ONE_TOKEN})
    assert answer.errors == []
    return int(answer.responses[0]["num_input_tokens"][0])


def over_http(server: TritonServer, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and reply of ``generate``."""
    connection = http.client.HTTPConnection(server.http_url, timeout=120)
    body = json.dumps({**values, "sampling_parameters": ONE_TOKEN})
    connection.request("POST", "/v2/models/minicpmo/generate", body, {"Content-Type": "application/json"})
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_a_recording_of_any_length_has_its_tokens(server: TritonServer) -> None:
    counts = {
        seconds: over_grpc(server, {"text_input": "What?", "audio": [recording(seconds)]})
        for seconds in SECONDS
    }
    around = counts[0.1] - num_tokens(0.1)  # template and question
    assert {seconds: count - around for seconds, count in counts.items()} == {
        seconds: num_tokens(seconds) for seconds in SECONDS
    }
    for seconds in (0.3, 30.01):
        status, reply = over_http(
            server, {"text_input": "What?", "audio": data_uri("audio/flac", recording(seconds))}
        )
        assert (status, reply["num_input_tokens"]) == (200, counts[seconds])


def test_a_recording_too_short_for_a_token_is_refused(server: TritonServer) -> None:
    clip = recording(0.05)
    [message] = stream_whole(server.grpc_url, "minicpmo", {"text_input": "What?", "audio": [clip]}).errors
    status, reply = over_http(server, {"text_input": "What?", "audio": data_uri("audio/flac", clip)})
    assert status == 400
    for text in (message, reply["error"]):
        assert "audio[0]" in text
        assert "too short" in text


@pytest.mark.parametrize("omni_mode", [False, True])
def test_a_video_counts_the_same_in_every_form(omni_mode: bool, server: TritonServer) -> None:
    video = seconds_video(2, with_sound=True)
    parameters = json.dumps({"omni_mode": omni_mode})
    given = over_grpc(
        server, {"text_input": "What happens?", "video": [video], "media_parameters": parameters}
    )
    part = {"type": "video_url", "video_url": {"url": data_uri("video/mp4", video)}}
    content = [part, {"type": "text", "text": "What happens?"}]
    messages = json.dumps([{"role": "user", "content": content}])
    assert over_grpc(server, {"messages": messages, "media_parameters": parameters}) == given
    status, reply = over_http(server, {"messages": messages, "media_parameters": parameters})
    assert (status, reply["num_input_tokens"]) == (200, given)


def test_a_conversation_with_media_in_two_turns(server: TritonServer, media_dir: Any) -> None:
    """Elements of the inputs go to the parts in their order, wherever the turn stands."""
    picture, clip = (media_dir / "coins.png").read_bytes(), recording(1)
    turns = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "Coins."},
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "And this?"}]},
    ]
    given = over_grpc(server, {"messages": json.dumps(turns), "image": [picture], "audio": [clip]})
    inline = json.loads(json.dumps(turns))
    inline[1]["content"][0] = {"type": "image_url", "image_url": {"url": data_uri("image/png", picture)}}
    inline[3]["content"][0] = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(clip).decode(), "format": "flac"},
    }
    status, reply = over_http(server, {"messages": json.dumps(inline)})
    assert (status, reply["num_input_tokens"]) == (200, given)
