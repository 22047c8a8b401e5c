"""Messages that nobody waits for, sent by a thread of their own.

They come from garbage collection too, where no lock may be taken and no thread started: handing one over
is a single ``SimpleQueue.put``, which is safe there, and the thread has been started beforehand.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

#: How long closing a client, or the interpreter's exit, waits for messages on their way.
DRAIN_S = 1.0

_Job = Callable[[], object]
_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


class Courier:
    """Runs jobs one after another in a daemon thread. A job that fails is dropped."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def start(self) -> None:
        """Start the thread, once. Not for garbage collectors."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():  # a fork leaves it behind
                self._thread = threading.Thread(
                    target=_work, args=(self._jobs,), name="minicpmo-courier", daemon=True
                )
                self._thread.start()
                _couriers.add(self)

    def post(self, job: _Job) -> None:
        """Hand ``job`` over. Never blocks or raises."""
        self._jobs.put(job)

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until what was handed over is done, at most ``timeout_s``; whether it is."""
        if self._thread is None or not self._thread.is_alive():
            return self._jobs.empty()
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout_s)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):
            job()
        del job  # it holds a transport, which must not outlive its client


@atexit.register
def _drain_all() -> None:
    for courier in list(_couriers):
        courier.drain()
