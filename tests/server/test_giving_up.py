"""A chat that is given up ends on the server: by every client, protocol, model and way of giving up.

Whether a generation ended early is told by the tokens that were generated, not by a clock: on a machine
that is busy everything takes longer, but only an answer that was not aborted has all of its tokens.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minicpmo_client import AsyncClient, Client, RequestTimeout
from minicpmo_triton.launcher import TritonServer
from tests.scrape import scrape, total

from .conftest import MAX_MODEL_LEN

QUESTION = "Tell me all"
#: Nearly the whole context; some eight seconds alone, more on a busy machine.
NUM_LONG = MAX_MODEL_LEN - 100
LONG = {"temperature": 0, "max_tokens": NUM_LONG, "ignore_eos": True}
IN_FLIGHT = ("minicpmo_llm_requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
GENERATED = "vllm:generation_tokens_total"
#: For a machine that does much else; on an idle one everything here takes a fraction of a second.
WAIT_S = 90.0
#: The second where the first token had not come within the first.
TIMEOUTS_S = (1.0, 4.0)

protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])
apis = pytest.mark.parametrize("api", ["sync", "async"])
#: ``minicpmo_unary`` has no stream.
answers = pytest.mark.parametrize(
    ("model", "stream"),
    [("minicpmo", True), ("minicpmo", False), ("llm", True), ("llm", False), ("minicpmo_unary", False)],
    ids=["minicpmo stream", "minicpmo whole", "llm stream", "llm whole", "unary"],
)


@pytest.fixture
def url(protocol: str, server: TritonServer) -> str:
    return server.grpc_url if protocol == "grpc" else f"http://{server.http_url}"


class Watch:
    """What the engine has generated since this was made, from the metrics endpoint."""

    def __init__(self, server: TritonServer) -> None:
        self._url = server.metrics_url
        self._before = 0.0
        self._before = self.num_generated_when_idle()

    def until_running(self) -> None:
        """Return once a token has been counted."""
        self._wait(lambda: self._num_generated() > 0, "nothing was generated")

    def num_generated_when_idle(self) -> float:
        """Wait until no request is in flight and what was generated is counted; its tokens."""
        self._wait(lambda: self._num_in_flight() == 0, "a request is still in flight")
        counted = -1.0
        while counted != (counted := self._num_generated()):
            time.sleep(0.25)  # figures are published every 0.1 s
        return counted

    def expect_early_end(self) -> None:
        """Some of the one answer was generated, and not all of it."""
        num_generated = self.num_generated_when_idle()
        assert 0 < num_generated < NUM_LONG, "the answer was generated to its end"

    def _num_generated(self) -> float:
        return total(scrape(self._url), GENERATED) - self._before

    def _num_in_flight(self) -> float:
        samples = scrape(self._url)
        return sum(total(samples, name) for name in IN_FLIGHT)

    @staticmethod
    def _wait(condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, failure
            time.sleep(0.02)


@pytest.fixture
def watch(server: TritonServer) -> Watch:
    return Watch(server)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 2 * WAIT_S))


@protocols
@apis
@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_leaving_the_loop_ends_the_generation(api: str, url: str, model: str, watch: Watch) -> None:
    """The client stays open meanwhile: it is the loop's end that counts."""

    async def leave() -> None:
        async with AsyncClient(url, model=model) as client:
            async for _ in client.chat(QUESTION, sampling=LONG):
                break
            await asyncio.to_thread(watch.expect_early_end)

    if api == "async":
        run(leave)
    else:
        with Client(url, model=model) as client:
            for _ in client.chat(QUESTION, sampling=LONG):
                break
            watch.expect_early_end()


@protocols
@apis
@answers
def test_running_out_of_time_ends_the_generation(
    api: str, url: str, model: str, stream: bool, watch: Watch
) -> None:
    """The client stays open meanwhile: its closing would cancel too."""

    async def ask(timeout_s: float) -> float:
        async with AsyncClient(url, model=model) as client:
            with pytest.raises(RequestTimeout, match=f"within {timeout_s:g} s"):
                await client.chat(QUESTION, sampling=LONG, stream=stream, timeout_s=timeout_s)
            return await asyncio.to_thread(watch.num_generated_when_idle)

    async def read(timeout_s: float) -> float:
        async with AsyncClient(url, model=model) as client:
            with pytest.raises(RequestTimeout, match=f"within {timeout_s:g} s"):
                await client.chat(QUESTION, sampling=LONG, timeout_s=timeout_s).read()
            return await asyncio.to_thread(watch.num_generated_when_idle)

    def ask_or_read(timeout_s: float) -> float:
        with Client(url, model=model) as client:
            with pytest.raises(RequestTimeout, match=f"within {timeout_s:g} s"):
                list(client.chat(QUESTION, sampling=LONG, stream=stream, timeout_s=timeout_s))
            return watch.num_generated_when_idle()

    for timeout_s in TIMEOUTS_S:
        if api == "sync":
            num_generated = ask_or_read(timeout_s)
        else:
            num_generated = asyncio.run((read if stream else ask)(timeout_s))
        if num_generated > 0:
            break
    assert 0 < num_generated < NUM_LONG, "the answer was generated to its end, or never begun"


@protocols
@answers
def test_cancelling_the_task_ends_the_generation(url: str, model: str, stream: bool, watch: Watch) -> None:
    async def cancel() -> None:
        async with AsyncClient(url, model=model) as client:
            answer = client.chat(QUESTION, sampling=LONG, stream=stream)
            task = asyncio.ensure_future(answer.read() if stream else answer)
            await asyncio.to_thread(watch.until_running)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.to_thread(watch.expect_early_end)

    run(cancel)


@protocols
def test_the_end_of_the_event_loop_ends_the_generation(url: str, watch: Watch) -> None:
    """Nobody closes the client: what asyncio cancels at its end is given up like anything else."""

    async def leave() -> None:
        async def read() -> None:
            await AsyncClient(url).chat(QUESTION, sampling=LONG).read()

        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(watch.until_running)
        assert not reading.done()

    run(leave)
    watch.expect_early_end()


def test_an_answer_without_max_tokens_fills_the_context(server: TritonServer) -> None:
    """What the next test gives up would not end by itself."""
    with Client(server.grpc_url) as client:
        answer = client.chat(QUESTION, sampling={"temperature": 0}, stream=False)
    assert answer.finish_reason == "length"
    assert answer.num_input_tokens + answer.num_output_tokens == MAX_MODEL_LEN
    assert answer.num_output_tokens >= NUM_LONG


@protocols
@pytest.mark.parametrize("options", [[], ["--no-stream"]], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_interrupting_the_command_ends_the_generation(
    sent: signal.Signals, status: int, options: list[str], url: str, watch: Watch
) -> None:
    argv = [sys.executable, "-m", "minicpmo_client.cli", "chat", "--url", url, "--temperature", "0"]
    process = subprocess.Popen(
        [*argv, *options, QUESTION], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        watch.until_running()
        process.send_signal(sent)
        _, error = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert (process.returncode, error) == (status, "")
    watch.expect_early_end()
