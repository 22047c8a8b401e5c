"""The gRPC transport against a real gRPC server in this process that speaks Triton's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minicpmo_client import (
    AsyncClient,
    CannotConnect,
    Client,
    InvalidRequest,
    MiniCPMOClientError,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from minicpmo_client.grpc_transport import GrpcTransport

WAIT_S = 10.0


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers a question ``COMMAND ARGUMENT``; remembers requests, metadata and cancellations."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.ended: dict[str, threading.Event] = {}
        self.was_cancelled: dict[str, bool] = {}
        self.aborted: list[str] = []

    def ModelReady(self, request: Any, context: Any) -> Any:
        if request.name == "broken":
            context.abort(grpc.StatusCode.INTERNAL, "cannot say")
        return service_pb2.ModelReadyResponse(ready=request.name == "minicpmo")

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        request = next(requests)
        self.requests.append(request)
        if request.model_name == "llm" and request.inputs[0].name == "cancel_request_id":
            self.aborted.append(request.raw_input_contents[0][4:].decode())
            yield final(request)
            return
        self.metadata.append(dict(context.invocation_metadata()))
        ended = self.ended.setdefault(request.id, threading.Event())

        def on_end() -> None:
            self.was_cancelled[request.id] = not finished
            ended.set()

        finished: list[bool] = []
        context.add_callback(on_end)
        yield from self._answer(request, context, ended)
        assert next(requests, None) is None, "the client leaves its side of the stream open"
        finished.append(True)

    def _answer(self, request: Any, context: Any, ended: threading.Event) -> Iterator[Any]:
        (turn,) = json.loads(request.raw_input_contents[0][4:])
        question = turn["content"] if isinstance(turn["content"], str) else turn["content"][-1]["text"]
        command, argument = question.split(" ", 1)
        if command == "abort":
            yield increment(request, "before ")
            context.abort(grpc.StatusCode[argument], "in ensemble 'minicpmo', field: broken on purpose")
        if command == "say":
            yield service_pb2.ModelStreamInferResponse(error_message=argument)
            ended.wait(0.3)  # the server ends the stream a little later
            return
        for index in range(int(argument)):
            yield increment(request, f"{request.id}:{index} ")
            if command == "slow" and ended.wait(0.05):
                return
        yield final(request)


def increment(request: Any, text: str) -> Any:
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.id = request.id
    add_output(reply.infer_response, "text_output", "BYTES", struct.pack("<I", len(text)) + text.encode())
    add_output(reply.infer_response, "num_output_tokens", "UINT32", struct.pack("<I", 1))
    add_output(reply.infer_response, "cumulative_logprob", "FP32", struct.pack("<f", -0.5))
    reply.infer_response.parameters["triton_final_response"].bool_param = False
    return reply


def add_output(response: Any, name: str, datatype: str, raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[1])
    response.raw_output_contents.append(raw)


def final(request: Any) -> Any:
    reply = service_pb2.ModelStreamInferResponse()
    reply.infer_response.id = request.id
    reply.infer_response.parameters["triton_final_response"].bool_param = True
    return reply


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Triton]]:
    triton = Triton()
    server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", triton
    server.stop(None).wait(WAIT_S)


@pytest.fixture
def client(served: tuple[str, Triton]) -> Iterator[Client]:
    with Client(served[0], timeout_s=WAIT_S) as opened:
        yield opened


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def was_cancelled(triton: Triton, request_id: str) -> bool:
    return triton.ended[request_id].wait(WAIT_S) and triton.was_cancelled[request_id]


def test_what_goes_over_the_wire(client: Client, served: tuple[str, Triton]) -> None:
    client.chat("count 1", images=[b"\x00\x01", b"x"], request_id="wire", stream=False)
    request = next(request for request in served[1].requests if request.id == "wire")
    sent = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    types = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert request.model_name == "minicpmo"
    assert types == {"messages": ("BYTES", [1]), "stream": ("BOOL", [1]), "image": ("BYTES", [2])}
    assert sent["image"] == b"\x02\0\0\0\x00\x01" + b"\x01\0\0\0x"
    assert sent["stream"] == b"\0"
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert "triton_grpc_error" not in served[1].metadata[-1], "with it, errors crash Triton 2.51"


def test_an_answer_streams_and_ends(client: Client, served: tuple[str, Triton]) -> None:
    chunks = list(client.chat("count 3", request_id="three"))
    assert [chunk.text for chunk in chunks] == ["three:0 ", "three:1 ", "three:2 "]
    assert [chunk.num_output_tokens for chunk in chunks] == [1, 1, 1]
    assert chunks[0].cumulative_logprob == -0.5
    assert not was_cancelled(served[1], "three")


@pytest.mark.parametrize("how", ["break", "close", "collect", "close the client"])
def test_giving_up_reaches_the_server_and_harms_no_other(how: str, served: tuple[str, Triton]) -> None:
    with Client(served[0]) as client, Client(served[0]) as other_client:
        other = (other_client if how == "close the client" else client).chat(
            "slow 20", request_id=f"other {how}"
        )
        next(other)
        stream = client.chat("slow 1000", request_id=how)
        for _ in stream if how == "break" else [next(stream)]:
            break
        if how == "close":
            stream.close()
        elif how == "close the client":
            client.close()
        elif how == "collect":
            del stream
            gc.collect()
        assert was_cancelled(served[1], how)
        assert eventually(lambda: how in served[1].aborted)
        assert len(list(other)) == 19
        assert f"other {how}" not in served[1].aborted


def test_closing_from_another_thread_ends_a_waiting_reader(client: Client) -> None:
    stream = client.chat("slow 1000")
    next(stream)
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    with pytest.raises(RequestCancelled, match="closed before its answer was complete"):
        stream.read()
    timer.join()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", ModelNotFound),
        ("UNAVAILABLE", ServerUnavailable),
        ("CANCELLED", RequestCancelled),
        ("INTERNAL", ServerError),
    ],
)
def test_a_status_becomes_its_error(client: Client, code: str, error: type[Exception]) -> None:
    stream = client.chat(f"abort {code}")
    assert next(stream).text == "before "
    with pytest.raises(error) as raised:
        next(stream)
    assert type(raised.value) is error
    assert str(raised.value) == "field: broken on purpose"
    assert raised.value.__cause__ is None


def test_an_error_inside_the_stream(client: Client) -> None:
    with pytest.raises(ModelNotFound, match="'nope' is not found"):
        client.chat("say Request for unknown model: 'nope' is not found", stream=False)
    with pytest.raises(ServerError, match=r"^plain$"):
        client.chat("say plain", stream=False)


def test_a_request_that_fails_is_not_cancelled(served: tuple[str, Triton]) -> None:
    """Triton 2.51 keeps a request for ever whose client leaves between its error and its stream's end."""
    url, triton = served
    with Client(url, timeout_s=WAIT_S) as client, pytest.raises(ServerError):
        client.chat("say plain", request_id="failed", stream=False)
    assert not was_cancelled(triton, "failed")

    async def ask() -> None:
        async with AsyncClient(url, timeout_s=WAIT_S) as client:
            with pytest.raises(ServerError):
                await client.chat("say plain", request_id="failed too").read()

    asyncio.run(ask())
    assert not was_cancelled(triton, "failed too")


def test_the_deadline_covers_the_whole_answer(client: Client, served: tuple[str, Triton]) -> None:
    started_s = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"no complete answer from 127.0.0.1:\d+ within 0.3 s"):
        client.chat("slow 1000", request_id="late", timeout_s=0.3, stream=False)
    assert 0.25 < time.monotonic() - started_s < WAIT_S / 2
    assert was_cancelled(served[1], "late")
    assert eventually(lambda: "late" in served[1].aborted)


def test_many_threads_share_a_client(client: Client) -> None:
    def ask(index: int) -> str:
        return client.chat("slow 3", request_id=f"t{index}", stream=False).text

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(48)))
    assert answers == [f"t{i}:0 t{i}:1 t{i}:2 " for i in range(48)]


def test_a_stream_outlives_its_client_variable(served: tuple[str, Triton]) -> None:
    assert len(list(Client(served[0]).chat("slow 3"))) == 3


def test_without_a_server(unused_port: int) -> None:
    with Client(f"127.0.0.1:{unused_port}") as client:
        with pytest.raises(ServerUnavailable, match=rf"^cannot connect to 127.0.0.1:{unused_port}: "):
            client.chat("x", stream=False)
        assert not client.is_ready()


class Failed:
    """A failed RPC as gRPC reports it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("details", "message"),
    [
        (
            "errors resolving a:1: [field:hostname lookup error:lookup failed: Domain name not found]",
            "cannot connect to a:1: Domain name not found",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed",
            "cannot connect to a:1: Socket closed",
        ),
        ("DNS resolution failed", "cannot connect to a:1: DNS resolution failed"),
        (
            "Stream removed (recvmsg:Connection reset by peer (104))",
            "lost the connection to a:1: Stream removed (recvmsg:Connection reset by peer (104))",
        ),
        ("the engine is restarting", "the engine is restarting"),
    ],
)
def test_losses_are_told_from_what_the_server_says(details: str, message: str) -> None:
    error = GrpcTransport("a:1").to_error(Failed(grpc.StatusCode.UNAVAILABLE, details), None)
    kind = CannotConnect if message.startswith("cannot connect") else ServerUnavailable
    assert (type(error), str(error)) == (kind, message)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_readiness(served: tuple[str, Triton]) -> None:
    assert Client(served[0]).is_ready()
    assert not Client(served[0], model="other").is_ready()
    with pytest.raises(ServerError, match="cannot say"):
        Client(served[0], model="broken").is_ready()


def test_a_server_that_starts_late_is_found_soon(unused_port: int) -> None:
    with Client(f"127.0.0.1:{unused_port}") as client:
        assert not client.is_ready()
        server = grpc.server(ThreadPoolExecutor(2))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Triton(), server)
        assert server.add_insecure_port(f"127.0.0.1:{unused_port}") == unused_port
        timer = threading.Timer(1.0, server.start)
        timer.start()
        try:
            client.wait_until_ready(WAIT_S)
        finally:
            timer.join()
            server.stop(None).wait(WAIT_S)


def test_a_connection_may_take_its_time(served: tuple[str, Triton]) -> None:
    """A far server, or TLS, needs some round trips; the first packet of this one takes a second."""
    host, port = served[0].split(":")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def relay() -> None:
            near, _ = listening.accept()
            with near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=pump, args=(near, far))
                back.start()
                time.sleep(1.0)
                pump(far, near)
                back.join()

        relaying = threading.Thread(target=relay, daemon=True)
        relaying.start()
        with Client(f"127.0.0.1:{listening.getsockname()[1]}", timeout_s=WAIT_S) as client:
            assert client.chat("count 1", stream=False).num_output_tokens == 1
        relaying.join(WAIT_S)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_closed_client_says_so(served: tuple[str, Triton]) -> None:
    client = Client(served[0])
    client.close()
    client.close()
    with pytest.raises(MiniCPMOClientError, match="the client is closed"):
        client.chat("x")
    with pytest.raises(MiniCPMOClientError, match="the client is closed"):
        client.is_ready()


@pytest.mark.parametrize("url", ["", "http://localhost:8001"])
def test_an_address_is_host_and_port(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url: expected host:port"):
        GrpcTransport(url)


def test_a_request_beyond_grpcs_limit_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicpmo_client.grpc_wire.MAX_MESSAGE_BYTES", 2**16 + 100)
    with pytest.raises(InvalidRequest, match=r"the request holds \d+ bytes, more than gRPC carries"):
        client.chat("count 1", images=[b"x" * 200])


def test_large_media_pass(client: Client, served: tuple[str, Triton]) -> None:
    client.chat("count 1", images=[bytes(20_000_000)], request_id="large", stream=False)
    (request,) = (request for request in served[1].requests if request.id == "large")
    assert sum(map(len, request.raw_input_contents)) > 20_000_000


def test_an_abandoned_stream_does_not_keep_the_interpreter(served: tuple[str, Triton]) -> None:
    code = (
        "from minicpmo_client import Client\n"
        f"stream = Client({served[0]!r}).chat('slow 1000', request_id='abandoned')\n"
        "print(next(stream).text)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S * 3, check=True
    )
    assert (result.stdout.strip(), result.stderr) == ("abandoned:0", "")
    assert was_cancelled(served[1], "abandoned")
    assert "abandoned" in served[1].aborted
