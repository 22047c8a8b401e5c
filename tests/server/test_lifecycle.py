"""Loading, unloading and loading again: the models answer as before, and an unload leaves nothing running."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc

from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.sessions import SHARED_MEMORY, members

from .conftest import server_options
from .leftovers import MARK, Leftovers
from .raw import Value, grpc_inputs, stream_whole, streaming

STEPS = ("preprocess", "vision_encoder", "audio_encoder", "llm")
#: As somebody loads them: a step comes with the first ensemble that has it.
LOADED = ("minicpmo", "encode", "minicpmo_unary")
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True})
#: What is under way when its model is unloaded: a few seconds' worth.
UNDER_WAY = json.dumps({"temperature": 0, "max_tokens": 1000, "ignore_eos": True})
#: vLLM's processes get 15 s to end by themselves; it takes them two or three.
UNLOAD_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def explicit(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """A server that loads nothing by itself, and leaves nothing behind when it ends."""
    leftovers = Leftovers()
    options = server_options(tiny_checkpoint)
    options = replace(
        options,
        environment={**options.environment, MARK: leftovers.mark},
        extra_arguments=("--model-control-mode=explicit",),
    )
    with TritonServer(options) as server:
        yield server
    try:
        leftovers.assert_none()
    finally:
        leftovers.end_processes()


def load(client: triton_grpc.InferenceServerClient) -> None:
    for model in LOADED:
        client.load_model(model)
    assert states(client) == dict.fromkeys((*LOADED, *STEPS), "READY")


def states(client: triton_grpc.InferenceServerClient) -> dict[str, str]:
    return {model.name: model.state for model in client.get_model_repository_index().models}


def unload(client: triton_grpc.InferenceServerClient, models: tuple[str, ...]) -> float:
    """Unload them in this order and wait until they are gone; the seconds that took."""
    started = time.monotonic()
    for model in models:
        client.unload_model(model)
    wait_until_gone(client, models)
    return time.monotonic() - started


def wait_until_gone(client: triton_grpc.InferenceServerClient, models: tuple[str, ...]) -> None:
    deadline = time.monotonic() + UNLOAD_LIMIT_S
    while set(left(client, models)) != {("UNAVAILABLE", "unloaded")}:
        assert time.monotonic() < deadline, left(client, models)
        time.sleep(0.05)


def left(client: triton_grpc.InferenceServerClient, models: tuple[str, ...]) -> list[tuple[str, str]]:
    index = client.get_model_repository_index().models
    return [(model.state, model.reason) for model in index if model.name in models]


def answers(server: TritonServer, picture: bytes) -> list[str]:
    """What every way in answers about a picture."""
    values: dict[str, Value] = {"text_input": "What?", "image": [picture], "sampling_parameters": SAMPLING}
    texts = []
    for model in ("minicpmo", "llm"):
        answer = stream_whole(server.grpc_url, model, values)
        assert (answer.errors, answer.num_final) == ([], 1)
        texts.append(answer.text)
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        unary = client.infer("minicpmo_unary", grpc_inputs(values)).as_numpy("text_output")
        rows = client.infer("encode", grpc_inputs({"text_input": "What?", "image": [picture]})).as_numpy(
            "image_embeds"
        )
    assert rows.shape == (64, 128)
    return [*texts, unary[0].decode()]


def assert_nothing_is_left(server: TritonServer) -> None:
    """Only tritonserver itself lives, without shared memory of a model's."""
    assert server._process is not None
    deadline = time.monotonic() + 20.0
    while (alive := members(server._process.pid)) != [server._process.pid]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in alive]
        time.sleep(0.1)
    assert list(SHARED_MEMORY.glob(f"{server._prefix}*")) == []


def test_load_infer_and_unload_again_and_again(
    explicit: TritonServer, media_dir: Path, report_line: Callable[[str], None]
) -> None:
    picture = (media_dir / "coins.png").read_bytes()
    with triton_grpc.InferenceServerClient(explicit.grpc_url) as client:
        load(client)
        expected = answers(explicit, picture)
        assert expected == [expected[0]] * 3
        idle_s = unload(client, (*LOADED, *STEPS))
        assert_nothing_is_left(explicit)
        with pytest.raises(triton_grpc.InferenceServerException, match="minicpmo_unary"):
            client.infer("minicpmo_unary", grpc_inputs({"text_input": "Hi"}))

        load(client)
        assert answers(explicit, picture) == expected
        busy_s = unload_under_way(explicit, client)
        assert_nothing_is_left(explicit)
    report_line(f"every model unloaded in {idle_s:.1f} s, under requests in {busy_s:.1f} s")


def unload_under_way(server: TritonServer, client: triton_grpc.InferenceServerClient) -> float:
    """Unload, the language model first, while every way in has requests: each gets its answer.

    Triton (2.51) keeps a model until the streams that asked it are closed, also after their answers.
    """
    values: dict[str, Value] = {"text_input": "Tell me all", "sampling_parameters": UNDER_WAY}
    models = ("llm", *LOADED, *STEPS[:-1])
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        streams = [
            stack.enter_context(streaming(server.grpc_url, model, {**values, "stream": True}))[0]
            for model in ("minicpmo", "llm")
            for _ in range(4)
        ]
        for answer in streams:
            answer.arrived.get(timeout=60)
        unary = pool.submit(client.infer, "minicpmo_unary", grpc_inputs(values))
        time.sleep(0.2)  # it may come too late, and must be told then
        started = time.monotonic()
        for model in models:
            client.unload_model(model)
        for answer in streams:
            assert answer.ended.wait(UNLOAD_LIMIT_S), "a request has no end"
            assert (answer.errors, answer.num_final) == ([], 1)
            assert answer.text
        refused = unary.exception(timeout=UNLOAD_LIMIT_S)
        assert refused is None or ("llm" in str(refused) and "Traceback" not in str(refused)), refused
    wait_until_gone(client, models)
    return time.monotonic() - started
