"""Requests that wait together run together.

A model without a batch dimension gets its requests one per ``execute``. ``execute`` therefore only
puts a job into the queue and returns, and one worker thread takes whatever has gathered: while one
batch runs, the next one fills. Nothing waits for a batch to become full. A job too heavy for a batch runs
by itself and lets the light ones that come meanwhile pass between its steps.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class MicroBatcher(Generic[J]):
    """One worker thread over a queue of jobs, taken in order until together they weigh ``max_batch``.

    A job weighs 1 unless ``weigh`` says otherwise; the last one taken may exceed the limit, and one that
    exceeds it by itself is handled alone. ``handle`` gets a non-empty list and answers every job of it; it
    must not raise.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[list[J]], None],
        max_batch: int,
        weigh: Callable[[J], int] = lambda job: 1,
    ) -> None:
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._heavy: deque[J] = deque()  # taken from the queue already, in order; the worker's own
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

    def let_light_jobs_pass(self) -> None:
        """For ``handle``, between two steps of a heavy job: handle one batch of the light ones that wait."""
        batch, going = self._take_waiting()
        if not going:
            self._jobs.put(None)  # for the loop
        if batch:
            self._handle(batch)

    def _is_heavy(self, job: J) -> bool:
        return self._weigh(job) > self._max_batch

    def _take(self) -> tuple[list[J], bool]:
        """Wait for one job, then take those already there; whether the batcher goes on."""
        if self._heavy:
            return [self._heavy.popleft()], True
        job = self._jobs.get()
        if job is None:
            return [], False
        if self._is_heavy(job):
            return [job], True
        return self._take_waiting(job)

    def _take_waiting(self, *first: J) -> tuple[list[J], bool]:
        """A batch of light jobs: ``first`` and those already in the queue; heavy ones are put aside."""
        batch = list(first)
        weight = sum(map(self._weigh, batch))
        while weight < self._max_batch:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return batch, False
            if self._is_heavy(job):
                self._heavy.append(job)
            else:
                batch.append(job)
                weight += self._weigh(job)
        return batch, True

    def _run(self) -> None:
        going = True
        while going or self._heavy:
            batch, more = self._take()
            going = going and more
            if batch:
                self._handle(batch)
