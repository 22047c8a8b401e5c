"""A chat that is given up ends on the server: by every client, protocol, model and way of giving up.

This machine may stop a process for seconds, so no clock tells whether a generation ended early: vLLM counts
the answers that reached their full length, and none of these may. All chats of a test run at once, which
takes little longer than one, and makes a full answer take half a minute.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from minicpmo_client import AsyncClient, Client, RequestTimeout
from minicpmo_triton.launcher import TritonServer
from tests.scrape import scrape, total

from .conftest import MAX_MODEL_LEN

QUESTION = "Tell me all"
LONG = {"temperature": 0, "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True}
WAIT_S = 120.0
#: The second where the machine had not begun every answer within the first.
TIMEOUTS_S = (2.0, 8.0)
APIS = ("sync", "async")
#: Model and ``stream``; ``minicpmo_unary`` has none.
ANSWERS = (("minicpmo", True), ("minicpmo", False), ("llm", True), ("llm", False), ("minicpmo_unary", False))

protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])


def address(server: TritonServer, protocol: str) -> str:
    return server.grpc_url if protocol == "grpc" else f"http://{server.http_url}"


class Watch:
    """What the engine does, from the metrics endpoint. Made while it has nothing to do."""

    def __init__(self, server: TritonServer) -> None:
        self._url = server.metrics_url
        self.until_idle()
        self._num_full_before = self.num_full()
        #: Whether :meth:`until` has seen so many.
        self.has_seen_all = False

    def until(self, num_running: int, while_: Callable[[], bool] = lambda: True) -> None:
        """Wait until so many generations run at once, as long as ``while_`` holds."""
        self._wait(
            lambda: self._count("vllm:num_requests_running") == num_running or not while_(),
            f"there are not {num_running} generations",
        )
        self.has_seen_all = while_()

    def until_idle(self) -> None:
        """Wait until no request is in flight, and until that is counted."""
        self._wait(
            lambda: (
                not any(
                    map(
                        self._count,
                        (
                            "minicpmo_llm_requests_in_flight",
                            "vllm:num_requests_running",
                            "vllm:num_requests_waiting",
                        ),
                    )
                )
            ),
            "a generation goes on",
        )
        time.sleep(0.3)  # counters are published every 0.1 s

    def expect_none_was_completed(self) -> None:
        num_full = self.num_full() - self._num_full_before
        assert num_full == 0, f"{num_full:g} answers were generated to their end"

    def num_full(self) -> float:
        return total(scrape(self._url), "vllm:request_success_total", finished_reason="length")

    def _count(self, name: str) -> float:
        return total(scrape(self._url), name)

    @staticmethod
    def _wait(condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, failure
            time.sleep(0.02)


@pytest.fixture
def watch(server: TritonServer) -> Watch:
    return Watch(server)


class Moments:
    """When the chats of a test give up, and when their clients may close: closing would cancel too."""

    def __init__(self) -> None:
        self.give_up = threading.Event()
        self.close = threading.Event()


@contextmanager
def chats(jobs: list[Callable[[Moments], None]]) -> Iterator[tuple[Moments, list[Future[None]]]]:
    """Run each job on a thread; what they raise is raised at the end."""
    moments = Moments()
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job, moments) for job in jobs]
        try:
            yield moments, running
        finally:
            moments.give_up.set()
            moments.close.set()
    for job in running:
        job.result()


def leave(api: str, url: str, model: str) -> Callable[[Moments], None]:
    """Break out of the loop after the first chunk."""

    def with_threads(moments: Moments) -> None:
        with Client(url, model=model) as client:
            for _ in client.chat(QUESTION, sampling=LONG):
                moments.give_up.wait(WAIT_S)
                break
            moments.close.wait(WAIT_S)

    async def with_asyncio(moments: Moments) -> None:
        async with AsyncClient(url, model=model) as client:
            async for _ in client.chat(QUESTION, sampling=LONG):
                await asyncio.to_thread(moments.give_up.wait, WAIT_S)
                break
            await asyncio.to_thread(moments.close.wait, WAIT_S)

    return with_threads if api == "sync" else lambda moments: asyncio.run(with_asyncio(moments))


@protocols
def test_leaving_the_loop_ends_the_generation(protocol: str, server: TritonServer, watch: Watch) -> None:
    url = address(server, protocol)
    jobs = [leave(api, url, model) for api in APIS for model in ("minicpmo", "llm")]
    with chats(jobs) as (moments, _):
        watch.until(len(jobs))
        moments.give_up.set()
        watch.until_idle()
    watch.expect_none_was_completed()


def run_out_of_time(
    api: str, url: str, model: str, stream: bool, timeout_s: float
) -> Callable[[Moments], None]:
    late = pytest.raises(RequestTimeout, match=f"within {timeout_s:g} s")

    def with_threads(moments: Moments) -> None:
        with Client(url, model=model, timeout_s=timeout_s) as client:
            with late:
                list(client.chat(QUESTION, sampling=LONG, stream=stream))
            moments.close.wait(WAIT_S)

    async def with_asyncio(moments: Moments) -> None:
        async with AsyncClient(url, model=model, timeout_s=timeout_s) as client:
            answer = client.chat(QUESTION, sampling=LONG, stream=stream)
            with late:
                await (answer.read() if stream else answer)
            await asyncio.to_thread(moments.close.wait, WAIT_S)

    return with_threads if api == "sync" else lambda moments: asyncio.run(with_asyncio(moments))


@protocols
def test_running_out_of_time_ends_the_generation(protocol: str, server: TritonServer, watch: Watch) -> None:
    url = address(server, protocol)
    for timeout_s in TIMEOUTS_S:
        started_s = time.monotonic()
        jobs = [run_out_of_time(api, url, *answer, timeout_s) for api in APIS for answer in ANSWERS]
        with chats(jobs):
            watch.until(len(jobs), while_=lambda s=started_s, t=timeout_s: time.monotonic() < s + t)
            while time.monotonic() < started_s + timeout_s:
                time.sleep(0.02)
            watch.until_idle()
        watch.expect_none_was_completed()
        if watch.has_seen_all:
            return
    pytest.fail("the answers had not all begun when their time was over")


@protocols
def test_cancelling_the_task_ends_the_generation(protocol: str, server: TritonServer, watch: Watch) -> None:
    url = address(server, protocol)

    async def cancel() -> None:
        clients = [AsyncClient(url, model=model) for model, _ in ANSWERS]
        answers = [
            client.chat(QUESTION, sampling=LONG, stream=stream)
            for client, (_, stream) in zip(clients, ANSWERS, strict=True)
        ]
        tasks = [
            asyncio.ensure_future(answer.read() if stream else answer)
            for answer, (_, stream) in zip(answers, ANSWERS, strict=True)
        ]
        await asyncio.to_thread(watch.until, len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await asyncio.to_thread(watch.until_idle)
        for client in clients:
            await client.close()

    asyncio.run(cancel())
    watch.expect_none_was_completed()


def test_the_end_of_the_event_loop_ends_the_generation(server: TritonServer, watch: Watch) -> None:
    """Nobody closes the clients: what asyncio cancels at its end is given up like anything else."""

    async def leave_behind(url: str, moments: Moments) -> None:
        async def read() -> None:
            await AsyncClient(url).chat(QUESTION, sampling=LONG).read()

        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(moments.give_up.wait, WAIT_S)
        assert not reading.done()

    urls = [address(server, protocol) for protocol in ("grpc", "http")]
    jobs = [lambda moments, url=url: asyncio.run(leave_behind(url, moments)) for url in urls]
    with chats(jobs) as (moments, _):
        watch.until(len(jobs))
        moments.give_up.set()
        watch.until_idle()
    watch.expect_none_was_completed()


def test_an_answer_without_max_tokens_fills_the_context(server: TritonServer) -> None:
    """So what the next test gives up would not end by itself soon."""
    with Client(server.grpc_url, timeout_s=WAIT_S) as client:
        text = "x" * (MAX_MODEL_LEN - 120)  # the tiny tokenizer has a token for each byte
        answer = client.chat(text, sampling={"temperature": 0, "ignore_eos": True}, stream=False)
    assert answer.finish_reason == "length"
    assert answer.num_input_tokens + answer.num_output_tokens == MAX_MODEL_LEN


@protocols
@pytest.mark.parametrize("options", [[], ["--no-stream"]], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_interrupting_the_command_ends_the_generation(
    number: signal.Signals,
    status: int,
    options: list[str],
    protocol: str,
    server: TritonServer,
    watch: Watch,
) -> None:
    """Its exit status, no word on stderr, and nothing left on the server.

    An answer takes eight seconds here. Where the machine stood still so long it may have been complete before
    the signal came: there are three tries.
    """
    command = [sys.executable, "-m", "minicpmo_client.cli", "chat", "--temperature", "0", QUESTION]
    for _ in range(3):
        num_full = watch.num_full()
        process = subprocess.Popen(
            [*command, "--url", address(server, protocol), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            watch.until(1, while_=lambda p=process: p.poll() is None)
            process.send_signal(number)
            _, error = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert error == ""
        watch.until_idle()
        if watch.num_full() == num_full:
            assert process.returncode == status
            return
    pytest.fail("the answer was generated to its end, three times")
