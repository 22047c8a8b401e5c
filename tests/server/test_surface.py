"""Every way in and every answer out, with tritonclient and plain HTTP alone."""

from __future__ import annotations

import base64
import http.client
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from minicpmo_triton.launcher import TritonServer

from .raw import Answer, grpc_inputs, http_inputs, stream_whole, streaming

GREEDY = json.dumps({"temperature": 0, "max_tokens": 12, "ignore_eos": True})
LONG = json.dumps({"temperature": 0, "max_tokens": 3000, "ignore_eos": True})
QUESTION = "What is in the picture?"
#: LONG takes about six seconds alone. An abort takes 0.1 s, but on two cores that vLLM keeps busy a request
#: may wait for its turn.
ABORT_LIMIT_S = 4.0


@pytest.fixture(scope="module")
def picture(media_dir: Path) -> bytes:
    return (media_dir / "coins.png").read_bytes()


@pytest.fixture(scope="module")
def expected(server: TritonServer, picture: bytes) -> str:
    """The ensemble's answer about the picture; every other way in must give the same."""
    answer = stream_whole(
        server.grpc_url,
        "minicpmo",
        {"text_input": QUESTION, "image": [picture], "sampling_parameters": GREEDY},
    )
    assert answer.errors == []
    return answer.text


def test_llm_takes_raw_requests(server: TritonServer, picture: bytes, expected: str) -> None:
    values = {"text_input": QUESTION, "image": [picture], "sampling_parameters": GREEDY}
    whole = stream_whole(server.grpc_url, "llm", values)
    streamed = stream_whole(server.grpc_url, "llm", {**values, "stream": True})
    assert (whole.errors, whole.num_final, len(whole.responses)) == ([], 1, 1)
    assert (streamed.errors, streamed.num_final) == ([], 1)
    assert len(streamed.responses) > 1  # differences only: together they are the whole
    assert whole.text == streamed.text == expected


def test_llm_gives_extra_outputs_only_when_asked(server: TritonServer) -> None:
    values = {"text_input": "Hi", "sampling_parameters": json.dumps({**json.loads(GREEDY), "logprobs": 1})}
    [plain] = stream_whole(server.grpc_url, "llm", values).responses
    assert set(plain) == {"text_output"}
    flags = (
        "reasoning_output",
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
    )
    asked = {f"return_{name}": True for name in flags}
    [full] = stream_whole(server.grpc_url, "llm", {**values, **asked}).responses
    assert set(full) == {"text_output", *flags}
    assert full["finish_reason"].tolist() == [b"length"]
    assert full["num_output_tokens"].tolist() == [12]
    assert len(json.loads(full["logprobs"][0])) == 12
    assert full["cumulative_logprob"][0] < 0
    assert full["num_input_tokens"][0] > 10


def test_ensemble_always_gives_every_output(server: TritonServer) -> None:
    answer = stream_whole(
        server.grpc_url, "minicpmo", {"text_input": "Hi", "stream": True, "sampling_parameters": GREEDY}
    )
    assert all(len(response) == 7 for response in answer.responses)
    assert sum(int(r["num_output_tokens"][0]) for r in answer.responses) == 12
    assert answer.responses[-1]["finish_reason"].tolist() == [b"length"]


def test_input_in_the_output(server: TritonServer) -> None:
    values = {"text_input": "Hi there", "sampling_parameters": GREEDY}
    for model in ("llm", "minicpmo"):
        without = stream_whole(server.grpc_url, model, values).text
        echoed = stream_whole(server.grpc_url, model, {**values, "exclude_input_in_output": False}).text
        assert echoed == "Hi there" + without
        refused = stream_whole(
            server.grpc_url, model, {**values, "exclude_input_in_output": False, "stream": True}
        )
        [message] = refused.errors
        assert "exclude_input_in_output" in message
        assert "streaming" in message


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_unary_answers_infer(protocol: str, server: TritonServer, picture: bytes, expected: str) -> None:
    values = {"text_input": QUESTION, "image": [picture], "sampling_parameters": GREEDY}
    client: Any
    if protocol == "grpc":
        client, inputs = triton_grpc.InferenceServerClient(server.grpc_url), grpc_inputs(values)
    else:
        client, inputs = triton_http.InferenceServerClient(server.http_url), http_inputs(values)
    with client:
        result = client.infer("minicpmo_unary", inputs)
        assert result.as_numpy("text_output").tolist() == [expected.encode()]
        assert result.as_numpy("finish_reason").tolist() == [b"length"]
        assert result.as_numpy("num_output_tokens").tolist() == [12]
        wrong = (grpc_inputs if protocol == "grpc" else http_inputs)(
            {"text_input": "", "image": [b"no image"]}
        )
        with pytest.raises(Exception, match=r"image\[0\]") as refused:
            client.infer("minicpmo_unary", wrong)
        assert str(refused.value.status()) in ("StatusCode.INVALID_ARGUMENT", "400")


def post(url: str, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(url, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_generate_and_generate_stream(
    model: str, server: TritonServer, picture: bytes, expected: str
) -> None:
    body = {
        "text_input": QUESTION,
        "image": [base64.b64encode(picture).decode()],
        "sampling_parameters": GREEDY,
    }
    whole = post(server.http_url, f"/v2/models/{model}/generate", body)
    assert whole.status == 200
    assert json.loads(whole.read())["text_output"] == expected
    streamed = post(server.http_url, f"/v2/models/{model}/generate_stream", {**body, "stream": True})
    assert streamed.status == 200
    parts = [event["text_output"] for event in events(streamed)]
    assert len(parts) > 1
    assert "".join(parts) == expected
    refused = post(server.http_url, f"/v2/models/{model}/generate", {**body, "image": ["AAAA"]})
    assert refused.status == 400
    assert "image[0]" in json.loads(refused.read())["error"]


def test_a_large_body_that_calls_itself_a_form(server: TritonServer, picture: bytes, expected: str) -> None:
    """As curl sends one unless told otherwise. Triton takes it apart on the stack of a thread."""
    body = {
        "text_input": QUESTION,
        "image": [base64.b64encode(picture).decode()],
        "sampling_parameters": GREEDY,
    }
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request(
        "POST",
        "/v2/models/minicpmo/generate",
        json.dumps(body) + " " * (48 << 20),  # white space is JSON too
        {"Content-Type": "application/x-www-form-urlencoded"},
    )
    response = connection.getresponse()
    assert response.status == 200
    assert json.loads(response.read())["text_output"] == expected


def token_times(answer: Answer, number: int) -> None:
    for _ in range(number):
        answer.arrived.get(timeout=60)


def assert_one_runs(server: TritonServer) -> None:
    """The gauge follows within a poll."""
    deadline = time.monotonic() + 2.0
    while pending(server) != 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pending(server) == 1


def wait_until_idle(server: TritonServer, timeout_s: float) -> float:
    """Seconds until nothing runs in ``llm``; fails after ``timeout_s``."""
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < timeout_s:
        if pending(server) == 0:
            return elapsed
        time.sleep(0.01)
    pytest.fail(f"{pending(server)} requests still run {timeout_s} s after they were cancelled")


def pending(server: TritonServer) -> int:
    from tests.scrape import scrape, total

    return int(total(scrape(server.metrics_url), "minicpmo_llm_requests_in_flight"))


def test_grpc_cancel_aborts_a_direct_request(server: TritonServer) -> None:
    values = {"text_input": "Tell me all", "stream": True, "sampling_parameters": LONG}
    with streaming(server.grpc_url, "llm", values) as (answer, client):
        token_times(answer, 3)
        assert_one_runs(server)
        client.stop_stream(cancel_requests=True)
        wait_until_idle(server, ABORT_LIMIT_S)
        received = len(answer.responses)
    time.sleep(0.2)
    assert len(answer.responses) == received  # nothing after it


def test_http_disconnect_aborts_a_direct_request(server: TritonServer) -> None:
    body = {"text_input": "Tell me all", "stream": True, "sampling_parameters": LONG}
    response = post(server.http_url, "/v2/models/llm/generate_stream", body)
    next(events(response))
    assert_one_runs(server)
    response.close()
    wait_until_idle(server, ABORT_LIMIT_S)


def test_cancel_by_id_aborts_the_ensembles_generation(server: TritonServer) -> None:
    name = uuid.uuid4().hex
    values = {"text_input": "Tell me all", "stream": True, "sampling_parameters": LONG}
    with streaming(server.grpc_url, "minicpmo", values, request_id=name) as (answer, _):
        token_times(answer, 3)
        cancel = stream_whole(server.grpc_url, "llm", {"cancel_request_id": name})
        assert (cancel.errors, cancel.responses, cancel.num_final) == ([], [], 1)
        assert answer.ended.wait(5)
    [message] = answer.errors
    assert "cancelled" in message
    wait_until_idle(server, ABORT_LIMIT_S)


def test_cancel_that_comes_before_the_request_counts(server: TritonServer) -> None:
    name = uuid.uuid4().hex
    stream_whole(server.grpc_url, "llm", {"cancel_request_id": name})
    late = stream_whole(server.grpc_url, "minicpmo", {"text_input": "Hi"}, request_id=name)
    assert len(late.errors) == 1
    assert late.responses == []
    again = stream_whole(
        server.grpc_url, "minicpmo", {"text_input": "Hi", "sampling_parameters": GREEDY}, request_id=name
    )
    assert again.errors == []


def test_cancel_of_an_empty_id_is_refused(server: TritonServer) -> None:
    [message] = stream_whole(server.grpc_url, "llm", {"cancel_request_id": ""}).errors
    assert "cancel_request_id" in message


def test_cancel_beside_a_prompt_is_refused(server: TritonServer) -> None:
    values = {"text_input": "Hi", "cancel_request_id": "chat-7", "sampling_parameters": GREEDY}
    answer = stream_whole(server.grpc_url, "llm", values)
    [message] = answer.errors
    assert "cancel_request_id: comes alone" in message
    assert answer.responses == []


def test_ill_typed_sampling_parameters_are_named(server: TritonServer) -> None:
    """What is no number is refused by name."""
    for key, value in (("temperature", "warm"), ("max_tokens", "four"), ("top_k", 1.5)):
        refused = stream_whole(
            server.grpc_url,
            "llm",
            {"text_input": "Hi", "sampling_parameters": json.dumps({key: value})},
        )
        [message] = refused.errors
        assert f"sampling_parameters.{key}" in message


def test_encoders_answer_infer_for_their_embeddings(server: TritonServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as client:
        values = {
            "patches": np.full((1024, 588), 128, np.uint8),
            "grid_sizes": np.array([[32, 32]], np.int32),
        }
        assert client.infer("vision_encoder", http_inputs(values)).as_numpy("image_embeds").shape == (64, 128)
        values = {"mel": np.zeros((100, 80), np.float32), "mel_lengths": np.array([100], np.int32)}
        assert client.infer("audio_encoder", http_inputs(values)).as_numpy("audio_embeds").shape == (10, 128)


def test_a_small_request_does_not_wait_for_a_large_one(
    server: TritonServer, report_line: Callable[[str], None]
) -> None:
    """A video's worth of slices takes the encoder seconds; a picture beside it passes between its batches."""
    patches = np.random.default_rng(0).integers(0, 256, (128, 1024, 588), np.uint8)

    def embeds(slices: np.ndarray) -> np.ndarray:
        sizes = np.full((len(slices), 2), 32, np.int32)
        inputs = grpc_inputs({"patches": slices.reshape(-1, 588), "grid_sizes": sizes})
        with triton_grpc.InferenceServerClient(server.grpc_url) as client:
            rows: np.ndarray = client.infer("vision_encoder", inputs).as_numpy("image_embeds")
            return rows

    alone = embeds(patches[:1])
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(embeds, patches)
        began, waits = time.monotonic(), []
        while not large.done():
            started = time.monotonic()
            np.testing.assert_array_equal(embeds(patches[:1]), alone)
            waits.append(time.monotonic() - started)
        rows = large.result()
    seconds = time.monotonic() - began
    report_line(
        f"beside a request of 128 slices, {seconds:.1f} s, {len(waits)} of one slice each waited"
        f" {max(waits):.2f} s at most"
    )
    assert max(waits) < seconds / 2
    np.testing.assert_allclose(rows[:64], alone, atol=1e-4)
    np.testing.assert_allclose(rows[-64:], embeds(patches[-1:]), atol=1e-4)
