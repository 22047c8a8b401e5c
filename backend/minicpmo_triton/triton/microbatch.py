"""Requests that wait together run together.

A model without a batch dimension gets its requests one per ``execute``. ``execute`` therefore only
puts a job into the queue and returns, and one worker thread takes whatever has gathered: while one
batch runs, the next one fills. Nothing waits for a batch to become full.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class MicroBatcher(Generic[J]):
    """One worker thread over a queue of jobs, taken in order until together they weigh ``max_batch``.

    A job weighs 1 unless ``weigh`` says otherwise; the last one taken may exceed the limit. ``handle``
    gets a non-empty list and answers every job of it; it must not raise.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[list[J]], None],
        max_batch: int,
        weigh: Callable[[J], int] = lambda job: 1,
    ) -> None:
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._handle = handle
        self._max_batch = max_batch
        self._weigh = weigh
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: J) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Finish every job submitted before, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _take(self) -> tuple[list[J], bool]:
        """Wait for one job, then take those already there; whether the batcher goes on."""
        batch: list[J] = []
        weight = 0
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            weight += self._weigh(job)
            if weight >= self._max_batch:
                return batch, True
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _run(self) -> None:
        going = True
        while going:
            batch, going = self._take()
            if batch:
                self._handle(batch)
