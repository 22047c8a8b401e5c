"""Requests of a model that answers from worker threads: their replies, and giving them up."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from minicpmo_triton.errors import Cancelled, MiniCPMOError
from minicpmo_triton.triton import tensors

#: Triton is asked this often whether a client has gone; a cancel reaches the engine within two of them.
POLL_INTERVAL_S = 0.05
#: Every how many polls a request is asked after that is most likely a step of an ensemble: Triton tells such
#: a step nothing, and each question is a call to the server from the process that streams the answers.
POLLS_PER_ENSEMBLE_QUESTION = 10
#: How long, and for how many ids, a cancellation waits for a request that is still on its way.
CANCELLED_ID_TTL_S = 60.0
MAX_CANCELLED_IDS = 4096


class Cancellable(Protocol):
    """What work under way offers."""

    def cancel(self) -> object: ...


class Stream:
    """One request on its way. ``finish`` is called once, after the last ``send``; any thread may cancel.

    Triton's side of a request is gone with its final response, and asking after it then ends the server
    (seen on 2.51). So that response waits for a question under way, and none is asked after it.
    """

    def __init__(self, request_id: str, sender: Any, responder: Responder, relayed_id: str = "") -> None:
        self.request_id = request_id
        #: The ids by which it can be cancelled; the second that of the client it is relayed for.
        self.ids = (request_id, relayed_id) if relayed_id else (request_id,)
        #: Asked after at every poll of this number.
        self.polls_per_question = 1
        self._sender = sender
        self._responder = responder
        self._lock = threading.Lock()
        self._work: Cancellable | None = None
        self._is_cancelled = False
        self._question = threading.Lock()
        self._is_finished = False

    def send(self, build: Callable[[], list[Any]]) -> None:
        """Queue responses; ``build`` makes them on the responder's thread."""
        self._responder.put(lambda: self._send(build))

    def _send(self, build: Callable[[], list[Any]]) -> None:
        for response in build():
            self._sender.send(response)

    def finish(self, error: MiniCPMOError | None = None) -> None:
        """Queue the final response: the error, or nothing but the flag."""
        self.finish_with(None if error is None else tensors.error_response(error))

    def finish_with(self, reply: Any) -> None:
        """Queue the final response; ``None`` is nothing but the flag."""
        self._responder.put(lambda: self._finish(reply))

    def _finish(self, reply: Any) -> None:
        with self._question:
            self._is_finished = True
        if reply is None:
            self._sender.send(flags=tensors.FINAL)
        else:
            tensors.send_final(self._sender, reply)

    def begin(self, work: Cancellable) -> None:
        """From now on a cancellation is passed on to ``work``; at once if it has come already."""
        with self._lock:
            self._work = work
            already = self._is_cancelled
        if already:
            work.cancel()

    def cancel(self) -> None:
        """Give it up. The work is told once: told again, it could be kept from cleaning up."""
        with self._lock:
            already, self._is_cancelled = self._is_cancelled, True
            work = self._work
        if work is not None and not already:
            work.cancel()

    def raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise Cancelled("the request was cancelled")

    def is_given_up(self) -> bool:
        """Whether the client has cancelled or gone, as Triton sees it (a call to the server)."""
        with self._question:
            return not self._is_finished and bool(self._sender.is_cancelled())


class Responder:
    """Builds and sends responses on a thread of its own, so that the engine's loop never waits for Triton."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Send what is waiting, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # a client that has gone must not stop the others' answers
                tensors.as_reply_error(error)


class InFlight:
    """The requests under way: cancelled by id, or because Triton says that their client has gone.

    ``on_count`` is told their number when it has changed, at most once a poll. A cancellation by id also
    counts for a request of that id that arrives within ``CANCELLED_ID_TTL_S``: it may have been given up
    while the encoders had it.
    """

    def __init__(
        self,
        on_count: Callable[[int], object] = lambda count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_count = on_count
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[Stream, None] = {}
        self._cancelled_ids: OrderedDict[str, float] = OrderedDict()  # id -> when it is forgotten
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cancellation", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        """Take a request in; :class:`Cancelled` if it was given up before it came."""
        with self._lock:
            forgotten_at = [self._cancelled_ids.pop(name, 0.0) for name in stream.ids]
            if max(forgotten_at) > self._clock():
                raise Cancelled("the request was cancelled before it reached the language model")
            self._streams[stream] = None

    def remove(self, stream: Stream) -> None:
        with self._lock:
            self._streams.pop(stream, None)

    def cancel(self, request_id: str) -> int:
        """Cancel the requests of this id; their number. None: remember it for one that is on its way."""
        with self._lock:
            found = [stream for stream in self._streams if request_id in stream.ids]
            if not found:
                self._cancelled_ids[request_id] = self._clock() + CANCELLED_ID_TTL_S
                self._cancelled_ids.move_to_end(request_id)
                while len(self._cancelled_ids) > MAX_CANCELLED_IDS:
                    self._cancelled_ids.popitem(last=False)
        for stream in found:
            stream.cancel()
        return len(found)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        told = 0
        for poll in itertools.count():
            if self._stop.wait(POLL_INTERVAL_S):
                return
            with self._lock:
                streams = list(self._streams)
            if len(streams) != told:  # here, since telling is a call to the server that may have to wait
                told = len(streams)
                self._try(self._on_count, told)
            for stream in streams:
                if poll % stream.polls_per_question == 0:
                    self._try(self._ask, stream)

    @staticmethod
    def _ask(stream: Stream) -> None:
        if stream.is_given_up():
            stream.cancel()

    @staticmethod
    def _try(question: Callable[..., object], *arguments: object) -> None:
        try:
            question(*arguments)
        except Exception as error:  # one that ended meanwhile must not end the watch over the others
            tensors.as_reply_error(error)
