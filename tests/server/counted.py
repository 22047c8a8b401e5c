"""What a few requests add to the counters of the metrics endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from minicpmo_triton.launcher import TritonServer
from tests.scrape import Sample, scrape, total

FINISHED = "vllm:request_success_total"


class Counted:
    """The endpoint before and after; ``change`` is the difference of a sum of samples."""

    def __init__(self, before: list[Sample]) -> None:
        self.before = before
        self.after = before

    def change(self, name: str, **labels: str) -> float:
        return total(self.after, name, **labels) - total(self.before, name, **labels)


@contextmanager
def counted(server: TritonServer, num_requests: int) -> Iterator[Counted]:
    """Read the counters around the body, in which the engine finishes ``num_requests``.

    vLLM's figures of an iteration appear a moment after its tokens are sent, those of a request's last
    iteration after all others of it: they are waited for.
    """
    result = Counted(settled(server))
    yield result
    deadline = time.monotonic() + 10
    while True:
        result.after = scrape(server.metrics_url)
        finished = result.change(FINISHED)
        if finished >= num_requests:
            break
        assert time.monotonic() < deadline, f"{finished} of {num_requests} requests counted"
        time.sleep(0.02)
    assert finished == num_requests


def settled(server: TritonServer) -> list[Sample]:
    """The counters once those of earlier requests have stopped moving."""
    samples = scrape(server.metrics_url)
    while True:
        time.sleep(0.2)
        before, samples = samples, scrape(server.metrics_url)
        if total(before, FINISHED) == total(samples, FINISHED):
            return samples
