"""Messages that nobody waits for, sent by a thread of their own.

They come from garbage collection too, where no lock may be taken and no thread started: handing one over
is a single ``SimpleQueue.put``, which is safe there, and the thread has been started beforehand.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

#: How long closing a client, or the interpreter's exit, waits for messages on their way.
DRAIN_S = 5.0

_Job = Callable[[], object]
_Jobs = SimpleQueue[_Job | None]


class Closable(Protocol):
    """What has messages to send when it is closed."""

    def close(self) -> None: ...


_threads: dict[threading.Thread, _Jobs] = {}
_open: weakref.WeakSet[Closable] = weakref.WeakSet()


class Courier:
    """Runs jobs one after another in a daemon thread. A job that fails is dropped."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
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
                _threads[self._thread] = self._jobs
                self._thread.start()

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


def close_at_exit(thing: Closable) -> None:
    """Close ``thing`` when the interpreter exits, if it still exists, in time for its messages to leave."""
    _open.add(thing)


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):
            job()
        del job  # it holds a transport, which must not outlive its client
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _finish() -> None:
    with contextlib.suppress(Exception):
        for thing in list(_open):
            thing.close()
    threads = dict(_threads)
    for jobs in threads.values():
        jobs.put(None)
    deadline = time.monotonic() + DRAIN_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
