"""What a few requests add to the counters of the metrics endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from minicpmo_triton.launcher import TritonServer
from tests.scrape import Sample, scrape, settled, total

FINISHED = "vllm:request_success_total"
#: A record of the engine's is published figure by figure; a scrape may come in the middle of it.
EVERY_FIGURE = "vllm:"


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
    result = Counted(settled(server.metrics_url, EVERY_FIGURE))
    yield result
    deadline = time.monotonic() + 10
    while True:
        result.after = scrape(server.metrics_url)
        finished = result.change(FINISHED)
        if finished >= num_requests:
            result.after = settled(server.metrics_url, EVERY_FIGURE)
            break
        assert time.monotonic() < deadline, f"{finished} of {num_requests} requests counted"
        time.sleep(0.02)
    assert result.change(FINISHED) == num_requests
