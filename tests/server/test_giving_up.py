"""Whoever gives an answer up, by whatever way of the client library, leaves no generation running."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from minicpmo_client import AsyncClient, Client, RequestTimeout
from minicpmo_triton.launcher import TritonServer
from tests.scrape import scrape, total

from .conftest import MANY_TOKENS
from .counted import FINISHED, settled
from .raw import Value, grpc_inputs, http_inputs, stream_whole

LONG = {"temperature": 0, "max_tokens": MANY_TOKENS, "ignore_eos": True}
LIMIT_S = 120.0
#: An abort takes some 0.1 s, but this machine may run neither client nor server for seconds.
ABORT_LIMIT_S = 30.0
IN_FLIGHT = "minicpmo_llm_requests_in_flight"

protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])
models = pytest.mark.parametrize("model", ["minicpmo", "llm", "minicpmo_unary"])
forms = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture
def url(protocol: str, server: TritonServer) -> str:
    return server.grpc_url if protocol == "grpc" else f"http://{server.http_url}"


def num_in_flight(server: TritonServer) -> int:
    return int(total(scrape(server.metrics_url), IN_FLIGHT))


def wait_for_one(server: TritonServer) -> None:
    deadline = time.monotonic() + LIMIT_S
    while num_in_flight(server) != 1:
        assert time.monotonic() < deadline, "the request did not reach the engine"
        time.sleep(0.02)


@contextmanager
def nothing_runs_on(server: TritonServer) -> Iterator[None]:
    """What the body gives up is aborted: soon nothing is in flight, and no answer reached its full length."""
    before = total(settled(server), FINISHED, finished_reason="length")
    assert num_in_flight(server) == 0
    yield
    deadline = time.monotonic() + ABORT_LIMIT_S
    num_quiet = 0
    while num_quiet < 5:  # the gauge lags by a poll, and a request may still be on its way to the engine
        num_quiet = 0 if num_in_flight(server) else num_quiet + 1
        assert time.monotonic() < deadline, "the generation runs on"
        time.sleep(0.05)
    assert total(settled(server), FINISHED, finished_reason="length") == before


@protocols
@models
@forms
def test_a_chat_that_runs_out_of_time_is_aborted(
    stream: bool, model: str, url: str, server: TritonServer
) -> None:
    def ask_and_wait() -> None:
        with Client(url, model=model) as client:
            if stream:
                list(client.chat("Tell me all", sampling=LONG, timeout_s=0.5))
            client.chat("Tell me all", sampling=LONG, timeout_s=0.5, stream=False)

    with nothing_runs_on(server), pytest.raises(RequestTimeout, match=r"within 0\.5 s"):
        ask_and_wait()

    async def ask_with_asyncio() -> None:
        async with AsyncClient(url, model=model) as client:
            if stream:
                async for _ in client.chat("Tell me all", sampling=LONG, timeout_s=0.5):
                    pass
            await client.chat("Tell me all", sampling=LONG, timeout_s=0.5, stream=False)

    with nothing_runs_on(server), pytest.raises(RequestTimeout, match=r"within 0\.5 s"):
        asyncio.run(ask_with_asyncio())


@protocols
@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_leaving_the_loop_of_the_asynchronous_client_aborts(
    model: str, url: str, server: TritonServer
) -> None:
    async def leave() -> None:
        async with AsyncClient(url, model=model, timeout_s=LIMIT_S) as client:
            async for _ in client.chat("Tell me all", sampling=LONG):
                break

    with nothing_runs_on(server):
        asyncio.run(leave())


@protocols
@models
def test_cancelling_the_task_that_waits_for_a_whole_answer_aborts(
    model: str, url: str, server: TritonServer
) -> None:
    async def cancel() -> None:
        async with AsyncClient(url, model=model, timeout_s=LIMIT_S) as client:
            task = asyncio.ensure_future(client.chat("Tell me all", sampling=LONG, stream=False))
            await asyncio.to_thread(wait_for_one, server)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with nothing_runs_on(server):
        asyncio.run(cancel())


@protocols
@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_closing_a_client_aborts_every_chat_it_has(model: str, url: str, server: TritonServer) -> None:
    with nothing_runs_on(server), Client(url, model=model, timeout_s=LIMIT_S) as client:
        chats = [client.chat("Tell me all", sampling=LONG) for _ in range(6)]
        next(chats[0])


@protocols
@models
@forms
def test_ctrl_c_in_the_command_aborts(stream: bool, model: str, url: str, server: TritonServer) -> None:
    command = [sys.executable, "-m", "minicpmo_client.cli", "chat", "--url", url, "--model", model]
    options = ["--temperature", "0", "--max-tokens", str(MANY_TOKENS), *([] if stream else ["--no-stream"])]
    with nothing_runs_on(server):
        process = subprocess.Popen(
            [*command, *options, "Tell me all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for_one(server)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, error) == (130, "")


@protocols
@pytest.mark.parametrize("when", ["before it comes", "under way"])
def test_what_minicpmo_unary_passed_on_is_cancelled_by_its_clients_id(
    when: str, protocol: str, server: TritonServer
) -> None:
    values: dict[str, Value] = {"text_input": "Tell me all", "sampling_parameters": json.dumps(LONG)}
    name = f"unary, {protocol}, cancelled {when}"
    client: Any
    if protocol == "grpc":
        client, inputs = triton_grpc.InferenceServerClient(server.grpc_url), grpc_inputs(values)
    else:
        client = triton_http.InferenceServerClient(server.http_url, network_timeout=LIMIT_S)
        inputs = http_inputs(values)
    with nothing_runs_on(server), ThreadPoolExecutor(1) as pool, client:
        if when == "before it comes":
            cancel(server, name)
        answer = pool.submit(client.infer, "minicpmo_unary", inputs, request_id=name)
        if when == "under way":
            wait_for_one(server)
            cancel(server, "somebody else's")
            cancel(server, "unary")
            assert not answer.done()
            cancel(server, name)
        with pytest.raises(Exception, match="the request was cancelled") as refused:
            answer.result(timeout=LIMIT_S)
    # Triton 2.51 has no HTTP status of its own for it.
    assert refused.value.status() == ("StatusCode.CANCELLED" if protocol == "grpc" else "400")


def cancel(server: TritonServer, request_id: str) -> None:
    reply = stream_whole(server.grpc_url, "llm", {"cancel_request_id": request_id})
    assert (reply.errors, reply.responses, reply.num_final) == ([], [], 1)
