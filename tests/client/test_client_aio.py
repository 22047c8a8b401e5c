"""AsyncClient over the fake, over gRPC and over HTTP: streaming, every way of giving up, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from test_client_grpc import Triton
from triton_http import TritonHttp, serving
from tritonclient.grpc import service_pb2_grpc

from minicpmo_client import (
    AsyncClient,
    AsyncFakeTransport,
    CannotConnect,
    Chat,
    InvalidRequest,
    MiniCPMOClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
)

WAIT_S = 10.0


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), WAIT_S * 3))


@pytest.fixture(scope="module")
def grpc_triton() -> Iterator[tuple[str, Triton]]:
    triton = Triton()
    server = grpc.server(ThreadPoolExecutor(80), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", triton
    server.stop(None).wait(WAIT_S)


@pytest.fixture(scope="module")
def http_triton() -> Iterator[TritonHttp]:
    with serving() as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def triton(request: pytest.FixtureRequest, grpc_triton: Any, http_triton: TritonHttp) -> tuple[str, Any]:
    return grpc_triton if request.param == "grpc" else (http_triton.url, http_triton)


def has_left(triton: Any, request_id: str) -> bool:
    if isinstance(triton, TritonHttp):
        return request_id in triton.left
    return bool(triton.was_cancelled.get(request_id))


async def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def test_an_answer_streams(triton: tuple[str, Any]) -> None:
    async def main() -> list[str]:
        async with AsyncClient(triton[0]) as client:
            return [chunk.text async for chunk in client.chat("count 3", request_id="three")]

    assert run(main) == ["three:0 ", "three:1 ", "three:2 "]
    assert "three" not in triton[1].aborted


def test_many_chats_share_a_client(triton: tuple[str, Any]) -> None:
    async def main() -> list[Chat]:
        async with AsyncClient(triton[0]) as client:
            return await asyncio.gather(
                *(client.chat("slow 3", request_id=f"m{i}").read() for i in range(40))
            )

    assert [answer.text for answer in run(main)] == [f"m{i}:0 m{i}:1 m{i}:2 " for i in range(40)]


@pytest.mark.parametrize(
    "how", ["break", "close", "block", "collect", "task", "wait_for", "close the client"]
)
def test_giving_up_reaches_the_server_and_harms_no_other(how: str, triton: tuple[str, Any]) -> None:
    url, server = triton
    request_id = f"{how} {url[:4]}"

    async def give_up(client: AsyncClient) -> None:
        stream = client.chat("slow 1000", request_id=request_id)
        if how == "break":
            async for _ in stream:
                break
        elif how in ("close", "close the client", "collect"):
            await anext_of(stream)
            if how == "close":
                stream.close()
                with pytest.raises(RequestCancelled):
                    await stream.read()
            elif how == "close the client":
                await client.close()
            del stream
            gc.collect()
        elif how == "block":
            async with stream:
                await anext_of(stream)
        elif how == "task":
            task = asyncio.create_task(stream.read())
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream.read(), 0.3)

    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as other_client:
            other = other_client.chat("slow 20", request_id=f"other {request_id}")
            await anext_of(other)
            await give_up(client)
            assert await eventually(lambda: has_left(server, request_id)), "the stream goes on"
            assert await eventually(lambda: request_id in server.aborted), "the engine was not told"
            assert len([chunk async for chunk in other]) == 19
            assert f"other {request_id}" not in server.aborted
            assert server.aborted.count(request_id) == 1

    run(main)


async def anext_of(stream: Any) -> Any:
    return await stream.__anext__()


def test_a_program_that_ends_after_a_break_still_tells_the_engine(triton: tuple[str, Any]) -> None:
    request_id = f"ended {triton[0][:4]}"

    async def main() -> None:
        async with AsyncClient(triton[0]) as client:
            async for _ in client.chat("slow 1000", request_id=request_id):
                break

    run(main)
    assert request_id in triton[1].aborted


def test_the_deadline_covers_the_whole_answer(triton: tuple[str, Any]) -> None:
    request_id = f"late {triton[0][:4]}"

    async def main() -> None:
        async with AsyncClient(triton[0], timeout_s=0.3) as client:
            with pytest.raises(RequestTimeout, match=r"no complete answer from 127.0.0.1:\d+ within 0.3 s"):
                await client.chat("slow 1000", request_id=request_id).read()
            assert await eventually(lambda: request_id in triton[1].aborted)

    run(main)


def test_errors_of_grpc() -> None:
    async def main() -> None:
        async with AsyncClient("127.0.0.1:9") as client:
            with pytest.raises(CannotConnect, match=r"cannot connect to 127.0.0.1:9"):
                await client.chat("x", stream=False)
            assert not await client.is_ready()
            with pytest.raises(RequestTimeout, match=r"was not ready within 0\.1 s"):
                await client.wait_until_ready(0.1)
        with pytest.raises(MiniCPMOClientError, match="the client is closed"):
            await client.is_ready()

    run(main)


def test_readiness(triton: tuple[str, Any]) -> None:
    async def main() -> None:
        async with AsyncClient(triton[0]) as client, AsyncClient(triton[0], model="other") as other:
            assert await client.is_ready()
            await client.wait_until_ready(1)
            assert not await other.is_ready()

    run(main)


# From here on over the fake.


def test_what_is_sent_and_when() -> None:
    fake = AsyncFakeTransport(["x"])

    async def main() -> None:
        client = AsyncClient(transport=fake)
        stream = client.chat("a", request_id="mine", images=[b"i"])
        assert fake.requests == []
        assert (await stream.read()).text == "x"
        await client.chat("b", stream=False, timeout_s=3.0)

    run(main)
    first, second = fake.requests
    assert (first.model, first.request_id, first.inputs["image"]) == ("minicpmo", "mine", [b"i"])
    assert second.inputs["stream"] is False
    assert fake.timeouts_s == [600.0, 3.0]


def test_a_wrong_request_fails_when_it_is_awaited() -> None:
    fake = AsyncFakeTransport(["x"])

    async def main() -> None:
        client = AsyncClient(transport=fake)
        with pytest.raises(InvalidRequest, match="timeout_s"):
            client.chat("x", timeout_s=0)
        with pytest.raises(InvalidRequest, match=r"content\[0\].image: cannot read 'gone.png'"):
            await client.chat("x", images=["gone.png"], stream=False)

    run(main)
    assert fake.requests == []


def test_an_answer_that_is_complete_is_neither_cancelled_nor_reported() -> None:
    fake = AsyncFakeTransport([{"text_output": [b"all"], "finish_reason": [b"stop"]}])

    async def main() -> None:
        client = AsyncClient(transport=fake)
        async for _ in client.chat("x"):
            break  # after the last increment: the engine has nothing to abort
        assert (await client.chat("x", stream=False)).finish_reason == "stop"

    run(main)
    assert fake.notices == []
    assert len(fake.cancelled) == 1


def test_an_answer_cut_short_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(ServerError, match="before the final response"):
            await AsyncClient(transport=AsyncFakeTransport(["one"], final=False)).chat("x", stream=False)

    run(main)


class Refusing(AsyncFakeTransport):
    """Cannot connect ``num_refusals`` times."""

    def __init__(self, num_refusals: int) -> None:
        super().__init__(["late"])
        self.num_refusals = num_refusals

    def start(self, request: Any, timeout_s: float | None) -> Any:
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            self._keep(request, timeout_s)
            return AsyncFakeTransport([CannotConnect("nobody")], final=False).start(request, timeout_s)
        return super().start(request, timeout_s)


def test_retries() -> None:
    async def main() -> None:
        fake = Refusing(2)
        started_s = time.monotonic()
        assert (await AsyncClient(transport=fake, retries=2).chat("x", stream=False)).text == "late"
        assert time.monotonic() - started_s >= 0.55
        assert len(fake.requests) == 3
        first, second, _ = (limit_s for limit_s in fake.timeouts_s if limit_s is not None)
        assert second <= first - 0.15
        with pytest.raises(CannotConnect, match="nobody"):
            await AsyncClient(transport=Refusing(1)).chat("x", stream=False)
        with pytest.raises(CannotConnect, match="nobody"):
            await AsyncClient(transport=Refusing(9), retries=9, timeout_s=0.3).chat("x", stream=False)

    run(main)
