"""What a client sees of an error, by every way in: docs/api.md's table holds, before a stream and amid it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from minicpmo_client import AsyncClient, Client, MiniCPMOClientError
from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.sessions import members
from tests.documents import table
from tests.scrape import scrape, total

from .conftest import MAX_MODEL_LEN, server_options
from .raw import grpc_inputs, http_inputs, stream_whole

LONG = {"temperature": 0, "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True}
WAIT_S = 120.0
CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED")
#: Code as this way tells it, the message, and how many responses came before.
Seen = tuple[str, str, int]
Way = Callable[[TritonServer, dict[str, Any], str], Seen]


def grpc_infer(server: TritonServer, sampling: dict[str, Any], request_id: str) -> Seen:
    values = {"text_input": "Tell me all", "sampling_parameters": json.dumps(sampling)}
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("minicpmo_unary", grpc_inputs(values), request_id=request_id)
        return str(refused.value.status()).removeprefix("StatusCode."), refused.value.message(), 0


def http_infer(server: TritonServer, sampling: dict[str, Any], request_id: str) -> Seen:
    values = {"text_input": "Tell me all", "sampling_parameters": json.dumps(sampling)}
    with triton_http.InferenceServerClient(server.http_url, network_timeout=WAIT_S) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("minicpmo_unary", http_inputs(values), request_id=request_id)
        return str(refused.value.status()), refused.value.message(), 0


def grpc_stream(server: TritonServer, sampling: dict[str, Any], request_id: str) -> Seen:
    values = {"text_input": "Tell me all", "stream": True, "sampling_parameters": json.dumps(sampling)}
    answer = stream_whole(server.grpc_url, "minicpmo", values, request_id)
    [error] = answer.errors
    status, _, message = error.partition(" ")
    return status or "text alone", message, len(answer.responses)


def generate(action: str) -> Way:
    def ask(server: TritonServer, sampling: dict[str, Any], request_id: str) -> Seen:
        body = {
            "id": request_id,
            "text_input": "Tell me all",
            "stream": action == "generate_stream",
            "sampling_parameters": json.dumps(sampling),
        }
        connection = http.client.HTTPConnection(server.http_url, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/v2/models/minicpmo/{action}", json.dumps(body))
            reply = connection.getresponse()
            parts = [part for part in reply.read().decode().split("\n\n") if part]
        events = [json.loads(part.removeprefix("data: ")) for part in parts]
        assert "error" not in events[:-1]
        return str(reply.status), events[-1]["error"], len(events) - 1

    return ask


def library(api: str, protocol: str, stream: bool) -> Way:
    def with_threads(url: str, texts: list[str], **options: Any) -> None:
        with Client(url, timeout_s=WAIT_S) as client:
            for chunk in client.chat("Tell me all", stream=stream, **options):
                texts.append(chunk.text)

    async def with_asyncio(url: str, texts: list[str], **options: Any) -> None:
        async with AsyncClient(url, timeout_s=WAIT_S) as client:
            answer = client.chat("Tell me all", stream=stream, **options)
            if stream:
                async for chunk in answer:
                    texts.append(chunk.text)
            else:
                await answer

    def ask(server: TritonServer, sampling: dict[str, Any], request_id: str) -> Seen:
        url = server.grpc_url if protocol == "grpc" else f"http://{server.http_url}"
        texts: list[str] = []
        options = {"sampling": sampling, "request_id": request_id}
        ask_it = with_threads if api == "Client" else lambda *a, **o: asyncio.run(with_asyncio(*a, **o))
        with pytest.raises(MiniCPMOClientError) as refused:
            ask_it(url, texts, **options)
        return type(refused.value).__name__, str(refused.value), len(texts)

    return ask


#: Row of the table -> the ways that it speaks of.
WAYS: dict[str, list[tuple[Way, bool]]] = {
    "gRPC `infer": [(grpc_infer, False)],
    "gRPC stream": [(grpc_stream, True)],
    "HTTP `infer": [(http_infer, False)],
    "HTTP `generate": [(generate("generate"), False)],
    "HTTP `generate_stream": [(generate("generate_stream"), True)],
    "Client`, `AsyncClient": [
        (library(api, protocol, stream), stream)
        for api in ("Client", "AsyncClient")
        for protocol in ("grpc", "http")
        for stream in (True, False)
    ],
}
ROWS = {row["way"]: row for row in table("docs/api.md", "### What a client sees")}


def test_the_table_speaks_of_every_way() -> None:
    assert set(ROWS) == set(WAYS)
    assert all(set(row) == {"way", *CODES} for row in ROWS.values())


@contextmanager
def asked(server: TritonServer, sampling: dict[str, Any]) -> Iterator[dict[str, Future[Seen]]]:
    """Ask by every way at once; the futures by request id, which begins with the row and ``stream``."""
    ways = [(row, way, stream) for row, found in WAYS.items() for way, stream in found]
    with ThreadPoolExecutor(len(ways)) as pool:
        yield {
            (name := f"{row}|{stream}|{uuid.uuid4().hex}"): pool.submit(way, server, sampling, name)
            for row, way, stream in ways
        }


def check(asked_for: dict[str, Future[Seen]], code: str, text: str, *, is_amid: bool) -> None:
    """What came is what the table says, and so is the message."""
    for name, future in asked_for.items():
        row, stream, _ = name.split("|")
        seen, message, num_before = future.result()
        cells = [cell.strip("` ") for cell in ROWS[row][code].split(",")]
        assert seen == cells[-1 if is_amid and stream == "True" else 0], f"{name}: {message}"
        assert text in message, name
        assert (num_before > 0) == (is_amid and stream == "True"), name


def test_a_wrong_request(server: TritonServer) -> None:
    with asked(server, {"temprature": 1}) as answers:
        check(answers, "INVALID_ARG", "sampling_parameters.temprature: ", is_amid=False)


def until_all_run(server: TritonServer, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while total(scrape(server.metrics_url), "vllm:num_requests_running") < number:
        assert time.monotonic() < deadline, "not every request has begun"
        time.sleep(0.02)
    time.sleep(0.5)  # so that every stream has its first response


def test_a_request_that_is_cancelled(server: TritonServer) -> None:
    """By somebody else, before it comes and amid its answer."""
    with asked(server, LONG) as answers:
        until_all_run(server, len(answers))
        for name in answers:
            stream_whole(server.grpc_url, "llm", {"cancel_request_id": name})
        check(answers, "CANCELLED", "request was cancelled", is_amid=True)
    name = uuid.uuid4().hex
    for found in WAYS.values():
        for way, _ in found:
            stream_whole(server.grpc_url, "llm", {"cancel_request_id": name})
            future: Future[Seen] = Future()
            future.set_result(way(server, LONG, name))
            row = next(row for row, ways in WAYS.items() if ways is found)
            check({f"{row}|False|": future}, "CANCELLED", "request was cancelled", is_amid=False)


def test_an_engine_that_ends(tiny_checkpoint: Path) -> None:
    """Amid the answers, and before those that come later: each says what to do, and none hangs."""
    with TritonServer(server_options(tiny_checkpoint), on_line=lambda line: None) as server:
        with asked(server, LONG) as answers:
            until_all_run(server, len(answers))
            assert server._process is not None
            [engine] = [pid for pid in members(server._process.pid) if is_engine(pid)]
            os.kill(engine, signal.SIGKILL)
            check(answers, "UNAVAILABLE", "restart the server", is_amid=True)
        with asked(server, LONG) as answers:
            check(answers, "UNAVAILABLE", "restart the server", is_amid=False)
        os.kill(server._process.pid, signal.SIGKILL)  # how it stops is not the question here


def is_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
