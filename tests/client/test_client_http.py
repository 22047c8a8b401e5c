"""Both HTTP transports against a server in this process that speaks Triton's HTTP protocol."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from triton_http import TritonHttp, serving

from minicpmo_client import (
    AsyncClient,
    CannotConnect,
    Chat,
    Client,
    InvalidRequest,
    MiniCPMOClientError,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)

WAIT_S = 10.0
Ask = Callable[..., Chat]


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonHttp]:
    with serving() as server:
        yield server


@pytest.fixture(params=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Asks with a client of its own, either kind; the whole answer."""

    def with_threads(url: str, question: Any, *, stream: bool = True, **options: Any) -> Chat:
        with Client(url, timeout_s=WAIT_S, **settings_of(options)) as client:
            if stream:
                return client.chat(question, **options).read()
            return client.chat(question, stream=False, **options)

    def with_asyncio(url: str, question: Any, *, stream: bool = True, **options: Any) -> Chat:
        async def main() -> Chat:
            async with AsyncClient(url, timeout_s=WAIT_S, **settings_of(options)) as client:
                if stream:
                    return await client.chat(question, **options).read()
                return await client.chat(question, stream=False, **options)

        return asyncio.run(main())

    return with_threads if request.param == "threads" else with_asyncio


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in ("model", "retries") if name in options}


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def sent(triton: TritonHttp, request_id: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    return next(request for request in triton.requests if request[2]["id"] == request_id)


def test_a_streamed_answer(triton: TritonHttp, ask: Ask) -> None:
    answer = ask(
        triton.url, "count 3", images=[b"\xff\0", b"data:image/png;base64,AAAA"], request_id="größe 🐈"
    )
    assert answer == Chat("".join(f"größe 🐈:{i} " for i in range(3)), None, 7, 3)
    path, headers, inputs = sent(triton, "größe 🐈")
    assert path == "/v2/models/minicpmo/generate_stream"
    assert headers["Content-Type"] == "application/json"
    assert inputs["stream"] is True
    assert inputs["image"] == [base64.b64encode(b"\xff\0").decode(), "data:image/png;base64,AAAA"]
    assert json.loads(inputs["messages"])[0]["content"][2]["text"] == "count 3"
    triton.requests.clear()


def test_a_whole_answer_comes_from_the_unary_model_in_binary(triton: TritonHttp, ask: Ask) -> None:
    answer = ask(
        triton.url,
        "say hello",
        images=[b"\xff\0", b"x"],
        sampling={"seed": 1},
        stream=False,
        request_id="whole",
    )
    assert answer == Chat("hello", "stop", 0, 3)
    path, headers, inputs = sent(triton, "whole")
    assert path == "/v2/models/minicpmo_unary/infer"
    assert headers["Content-Type"] == "application/octet-stream"
    assert inputs["image"] == [b"\xff\0", b"x"]
    assert set(inputs) == {"id", "messages", "image", "sampling_parameters"}
    triton.requests.clear()


def test_a_whole_answer_of_a_model_without_a_sibling(triton: TritonHttp, ask: Ask) -> None:
    assert ask(triton.url, "say hello", stream=False, model="llm", request_id="json").text == "hello as JSON"
    path, _, inputs = sent(triton, "json")
    assert path == "/v2/models/llm/generate"
    assert inputs["return_finish_reason"] is True
    with pytest.raises(ServerError, match="exactly 1 response"):
        ask(triton.url, "twice", stream=False, model="llm")
    triton.requests.clear()


@pytest.mark.parametrize(
    ("question", "stream", "error", "message"),
    [
        ("fail image[0]: not an image", True, InvalidRequest, "image[0]: not an image"),
        (
            "fail the engine has stopped; restart the server",
            True,
            ServerUnavailable,
            "the engine has stopped; restart the server",
        ),
        ("fail something", True, ServerError, "something"),
        ("midway 1", True, InvalidRequest, "sampling_parameters: broken on purpose"),
        ("fail 400 text: bad", False, InvalidRequest, "text: bad"),
        ("fail 503 stopped", False, ServerUnavailable, "stopped"),
        ("fail 500 odd", False, ServerError, "odd"),
    ],
)
def test_errors(
    triton: TritonHttp, ask: Ask, question: str, stream: bool, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        ask(triton.url, question, stream=stream)
    assert (type(raised.value), str(raised.value)) == (error, message)


def test_an_unknown_model(triton: TritonHttp, ask: Ask) -> None:
    for stream in (True, False):
        with pytest.raises(ModelNotFound, match="'nope' is not found"):
            ask(triton.url, "say x", model="nope", stream=stream)


def test_an_answer_that_is_cut_off(triton: TritonHttp, ask: Ask) -> None:
    with pytest.raises(ServerUnavailable, match=r"lost the connection to 127.0.0.1:\d+: .* cut off"):
        ask(triton.url, "cut 3")


@pytest.mark.parametrize("question", ["slow 1000", "silent 1"])
def test_the_deadline_covers_the_whole_answer(triton: TritonHttp, ask: Ask, question: str) -> None:
    started_s = time.monotonic()
    request_id = f"late {question} {started_s}"
    with pytest.raises(RequestTimeout, match=r"no complete answer from 127.0.0.1:\d+ within 0.3 s"):
        ask(triton.url, question, timeout_s=0.3, request_id=request_id)
    assert 0.25 < time.monotonic() - started_s < 2.5
    assert eventually(lambda: request_id in triton.aborted)


def test_large_media_pass(triton: TritonHttp, ask: Ask) -> None:
    large = np.random.default_rng(0).bytes(8_000_000)
    assert ask(triton.url, "say x", images=[large], stream=False, request_id="large").text == "x"
    assert ask(triton.url, "count 1", images=[large], request_id="large stream").text == "large stream:0 "
    assert sent(triton, "large")[2]["image"] == [large]
    assert base64.b64decode(sent(triton, "large stream")[2]["image"][0]) == large
    triton.requests.clear()


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_without_a_server(unused_port: int, ask: Ask) -> None:
    for stream in (True, False):
        with pytest.raises(
            CannotConnect, match=rf"^cannot connect to 127.0.0.1:{unused_port}: Connection refused$"
        ):
            ask(f"http://127.0.0.1:{unused_port}", "x", stream=stream)
    with pytest.raises(CannotConnect, match=r"cannot connect to no-such-host\.invalid:80: "):
        ask("http://no-such-host.invalid:80", "x")


def test_retries_reach_a_server_that_comes_late(unused_port: int, ask: Ask) -> None:
    """Nothing listens at first, so nothing was sent, and the request may go out again."""
    replies = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(
        b'data: {"text_output": "late"}\n\n'
    )
    raw = RawServer(replies + b"0\r\n\r\n", port=unused_port)
    timer = threading.Timer(0.3, raw.start)
    timer.start()
    assert ask(f"http://127.0.0.1:{unused_port}", "x", retries=6).text == "late"
    timer.join()
    raw.stop()


def test_what_was_sent_is_never_sent_again(ask: Ask) -> None:
    raw = RawServer(b"")
    raw.start()
    with pytest.raises(ServerUnavailable, match="lost the connection"):
        ask(raw.url, "x", retries=5, model="llm")
    raw.stop()
    chat, notice = raw.bodies
    assert b"messages" in chat
    assert json.loads(notice)["cancel_request_id"] == json.loads(chat)["id"]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class RawServer:
    """Answers every request with the same bytes, in pieces of ``step``, and hangs up."""

    def __init__(self, reply: bytes, *, step: int = 2**20, port: int = 0) -> None:
        self.reply, self.step = reply, step
        self.bodies: list[bytes] = []
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self.socket.listen()
        self.thread.start()

    def stop(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(2**16)
                head, _, body = head.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                while len(body) < length:
                    body += connection.recv(2**16)
                self.bodies.append(body)
                for at in range(0, len(self.reply), self.step):
                    connection.sendall(self.reply[at : at + self.step])
                    if self.step == 1:
                        time.sleep(0)


EVENT = 'data: {"text_output": "größer", "finish_reason": "stop"}\n\n'.encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT) + b"0\r\n\r\n",
        OK
        + b"transfer-encoding: Chunked\r\n\r\n"
        + chunk(EVENT[:20])
        + chunk(EVENT[20:])
        + b"0\r\nX: y\r\n\r\n",
        OK + b"Content-Length: " + str(len(EVENT)).encode() + b"\r\n\r\n" + EVENT,
        OK + b"\r\n" + EVENT,
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n: comment\r\n" + EVENT.replace(b"\n", b"\r\n"),
        b"HTTP/1.0 200\r\n\r\n" + EVENT,
    ],
)
@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_bodies_of_every_kind_in_pieces_of_any_size(ask: Ask, reply: bytes, step: int) -> None:
    raw = RawServer(reply, step=step)
    raw.start()
    assert ask(raw.url, "x") == Chat("größer", "stop")
    raw.stop()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"", "lost the connection"),
        (b"HTTP/1.1 200", "lost the connection|before the final response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "lost the connection"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", "cut off"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "lost the connection"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(EVENT), "cut off"),
        (OK + b"Content-Length: 999\r\n\r\n" + EVENT, "cut off"),
        (OK + b"\r\ndata: [1]\n\n", "not a JSON object"),
        (OK + b"\r\ndata: {\n\n", "not a JSON object"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>no</html>", "<html>no</html>"),
    ],
)
def test_broken_replies_are_errors_of_the_one_tree(ask: Ask, reply: bytes, problem: str) -> None:
    raw = RawServer(reply)
    raw.start()
    with pytest.raises(MiniCPMOClientError, match=problem):
        ask(raw.url, "x", model="llm")
    raw.stop()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"outputs": [{"name": "a"}]}', b"\xff"])
def test_an_unreadable_reply_to_infer(ask: Ask, body: bytes) -> None:
    raw = RawServer(b"HTTP/1.1 200 OK\r\n\r\n" + body)
    raw.start()
    with pytest.raises(ServerError, match="reply to infer cannot be read"):
        ask(raw.url, "x", stream=False)
    raw.stop()


@pytest.mark.parametrize("how", ["break", "close", "collect", "close the client"])
def test_giving_up_reaches_the_server_and_harms_no_other(how: str, triton: TritonHttp) -> None:
    with Client(triton.url) as client, Client(triton.url) as other_client:
        other = other_client.chat("slow 20", request_id=f"other {how}")
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
        assert eventually(lambda: how in triton.left)
        assert eventually(lambda: how in triton.aborted)
        assert len(list(other)) == 19
        assert f"other {how}" not in triton.aborted


def test_closing_from_another_thread_ends_a_waiting_reader(triton: TritonHttp) -> None:
    with Client(triton.url) as client:
        stream = client.chat("silent 1")
        timer = threading.Timer(0.2, stream.close)
        timer.start()
        started_s = time.monotonic()
        with pytest.raises(RequestCancelled, match="closed before its answer was complete"):
            stream.read()
        assert time.monotonic() - started_s < 2
        timer.join()


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), WAIT_S * 3))


def test_readiness(triton: TritonHttp) -> None:
    assert Client(triton.url).is_ready()
    assert not Client(triton.url, model="other").is_ready()

    async def main() -> None:
        assert await AsyncClient(triton.url).is_ready()
        assert not await AsyncClient(triton.url, model="other").is_ready()

    run(main)


def test_embeddings(triton: TritonHttp) -> None:
    expected = np.arange(128, dtype=np.float32).reshape(64, 2)
    with Client(triton.url) as client:
        found = client.embed(images=[b"one", b"two"], audio=[b"three"])
        with pytest.raises(InvalidRequest, match=r"^images\[1\]: not an image$"):
            client.embed(images=[b"good", b"bad"])

    async def main() -> Any:
        async with AsyncClient(triton.url) as client:
            with pytest.raises(InvalidRequest, match=r"^images\[1\]: not an image$"):
                await client.embed(images=[b"good", b"bad"])
            return await client.embed(images=[b"one", b"two"], audio=[b"three"])

    for embeddings in (found, run(main)):
        assert (len(embeddings.images), len(embeddings.audio)) == (2, 1)
        for rows in (*embeddings.images, *embeddings.audio):
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, expected)


def test_a_closed_client_says_so(triton: TritonHttp) -> None:
    client = Client(triton.url)
    client.close()
    client.close()
    with pytest.raises(MiniCPMOClientError, match="the client is closed"):
        client.chat("x")
    with pytest.raises(MiniCPMOClientError, match="the client is closed"):
        client.is_ready()


def test_many_threads_share_a_client(triton: TritonHttp) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Client(triton.url, timeout_s=WAIT_S) as client, ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda i: client.chat("slow 3", request_id=f"t{i}").read().text, range(48))
        assert list(answers) == [f"t{i}:0 t{i}:1 t{i}:2 " for i in range(48)]


@pytest.mark.parametrize("how", ["break", "abandon"])
def test_a_program_that_ends_still_tells_the_engine(how: str, triton: TritonHttp) -> None:
    code = f"""
from minicpmo_client import Client
stream = Client({triton.url!r}).chat("slow 1000", request_id="ended {how}")
if {how!r} == "abandon":
    print(next(stream).text)
else:
    for chunk in stream:
        print(chunk.text)
        break
    del stream
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
        check=True,
    )
    assert (result.stdout.strip(), result.stderr) == (f"ended {how}:0", "")
    assert f"ended {how}" in triton.aborted
