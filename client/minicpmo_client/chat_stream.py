"""An answer under way, for threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from minicpmo_client.courier import close_at_exit
from minicpmo_client.errors import (
    CannotConnect,
    MiniCPMOClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
)
from minicpmo_client.settings import Deadline
from minicpmo_client.transport import Call, Transport
from minicpmo_client.wire import (
    CANCEL_TIMEOUT_S,
    Chat,
    Chunk,
    Request,
    Response,
    cancel_request,
    join_chunks,
    parse_chunk,
)

CLOSED = "the chat was closed before its answer was complete"


class ChatStream:
    """An answer under way: an iterator of :class:`Chunk`.

    Leaving a ``for`` loop early, leaving a ``with`` block, :meth:`close` and garbage collection all cancel
    what is still to come, and only this chat; the engine is told by id, in the background, since Triton's
    ensembles do not pass a cancel on. One thread reads; any thread may close.

    >>> from minicpmo_client import Client, FakeTransport
    >>> fake = FakeTransport(["One", " two", " three"])
    >>> for chunk in Client(transport=fake).chat("Count", request_id="count-1"):
    ...     print(chunk.text)
    ...     break
    One
    >>> fake.cancelled, [notice.inputs for notice in fake.notices]
    (['count-1'], [{'cancel_request_id': [b'count-1']}])
    """

    def __init__(
        self, transport: Transport, request: Request, limit_s: float | None, delays_s: Iterator[float]
    ) -> None:
        self.request_id = request.request_id
        self._answer = Answer()
        self._transport = transport
        self._request = request
        self._delays_s = delays_s
        self._closed = threading.Event()
        self._engine_told = False
        deadline = Deadline(limit_s)
        self._deadline = deadline
        self._start: Callable[[], Call] = lambda: transport.start(request, deadline.remaining_s())
        try:
            self._call = transport.start(request, limit_s)
        except KeyboardInterrupt:  # nobody will have a stream to close, and the request may have left
            self._tell_engine()
            raise
        close_at_exit(self)

    def __iter__(self) -> Generator[Chunk, None, None]:
        # A generator of its own, so that leaving the loop cancels even if the stream is kept in a variable.
        try:
            while (chunk := self._read()) is not None:
                yield chunk
        finally:
            self.close()

    def __next__(self) -> Chunk:
        chunk = self._read()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self) -> Chat:
        """The rest of the answer, waited for and put together; all of it if nothing was read before."""
        return join_chunks(self)

    def close(self) -> None:
        """Cancel what has not arrived. Never blocks. Reading on raises :class:`RequestCancelled`."""
        self._closed.set()
        if not self._answer.ended:
            self._call.cancel()
            self._tell_engine()

    def _read(self) -> Chunk | None:
        while not self._answer.ended:
            if self._closed.is_set():
                raise RequestCancelled(CLOSED)
            try:
                # Read on past the final response: the server ends the stream, and nothing is left to cancel.
                for response in self._call:
                    if (chunk := self._answer.take(response)) is not None:
                        return chunk
                self._answer.end()
            except CannotConnect as error:
                self._retry(error)
            except MiniCPMOClientError as error:
                if isinstance(error, RequestTimeout) and not self._answer.final_seen:
                    self._tell_engine()
                self._answer.fail(error)
        return None

    def _retry(self, error: CannotConnect) -> None:
        """Start once more, or end with ``error`` where no retry or no time is left."""
        delay_s = next(self._delays_s, None)
        if delay_s is None or not self._deadline.leaves(delay_s):
            self._answer.fail(error)
            return
        if not self._closed.wait(delay_s):
            self._call = self._start()

    def _tell_engine(self) -> None:
        notice = cancel_request(self._request)
        if notice is not None and not self._answer.finished and not self._engine_told:
            self._transport.notify(notice, CANCEL_TIMEOUT_S)
            self._engine_told = True  # afterwards: a Ctrl-C may come between, and whoever closes next does it

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter shutdown the transport may be half gone; there is no one to tell.
        with contextlib.suppress(Exception):
            self.close()


class Answer:
    """How far an answer has come, whoever reads it.

    ``finished``: the last increment was seen; ``final_seen``: the final response; ``ended``: nothing more
    will come, since the server ended the stream or an error did.
    """

    def __init__(self) -> None:
        self.finished = False
        self.final_seen = False
        self.ended = False

    def take(self, response: Response) -> Chunk | None:
        """The chunk in a response, if it carries one."""
        self.final_seen = self.final_seen or response.final
        if not response.outputs:
            return None
        try:
            chunk = parse_chunk(response.outputs)
        except ServerError:
            self.final_seen = False  # what cannot be read must not count as the end of an answer
            raise
        self.finished = self.finished or chunk.finish_reason is not None
        return chunk

    def end(self) -> None:
        """The server ended the stream."""
        self.ended = True
        if not self.final_seen:
            raise ServerError("the server ended the stream before the final response")

    def fail(self, error: MiniCPMOClientError) -> None:
        """``error`` ended the stream; raised again unless the answer was complete before it."""
        self.ended = True
        if not self.final_seen:
            raise error
