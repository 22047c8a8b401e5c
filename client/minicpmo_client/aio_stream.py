"""An answer under way, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType

from minicpmo_client.chat_stream import Answer
from minicpmo_client.errors import (
    CHAT_CLOSED,
    CannotConnect,
    MiniCPMOClientError,
    RequestCancelled,
)
from minicpmo_client.settings import Deadline
from minicpmo_client.transport import AsyncCall, AsyncTransport
from minicpmo_client.wire import CANCEL_TIMEOUT_S, Chat, Chunk, Request, cancel_request, join_chunks


class AsyncChatStream:
    """An answer under way: an asynchronous iterator of :class:`Chunk`.

    The request leaves with the first read (files are read in a thread before). Leaving an ``async for``
    early, leaving an ``async with`` block, :meth:`close`, garbage collection and the cancellation of the
    task that reads all cancel what is still to come. It belongs to one event loop.

    >>> import asyncio
    >>> from minicpmo_client import AsyncClient, AsyncFakeTransport
    >>> fake = AsyncFakeTransport(["One", " two", " three"])
    >>> async def main():
    ...     async for chunk in AsyncClient(transport=fake).chat("Count", request_id="count-1"):
    ...         print(chunk.text)
    ...         break
    >>> asyncio.run(main())
    One
    >>> fake.cancelled, [notice.inputs for notice in fake.notices]
    (['count-1'], [{'cancel_request_id': [b'count-1']}])
    """

    def __init__(
        self,
        transport: AsyncTransport,
        build: Callable[[], Awaitable[Request]],
        request_id: str,
        limit_s: float | None,
        delays_s: Iterator[float],
    ) -> None:
        self.request_id = request_id
        self._transport = transport
        self._build = build
        self._limit_s = limit_s
        self._delays_s = delays_s
        self._answer = Answer()
        self._closed = False
        self._call: AsyncCall | None = None
        self._request: Request | None = None
        self._deadline = Deadline(limit_s)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> _Loop:
        # An object of its own, so that leaving the loop cancels even if the stream is kept in a variable.
        return _Loop(self)

    async def __anext__(self) -> Chunk:
        chunk = await self._read()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self) -> Chat:
        """The rest of the answer, waited for and put together; all of it if nothing was read before."""
        return join_chunks([chunk async for chunk in self])

    def close(self) -> None:
        """Cancel what has not arrived. Never blocks. Reading on raises :class:`RequestCancelled`."""
        first, self._closed = not self._closed, True
        if self._call is not None and not self._answer.ended:
            self._call.cancel()
            if first:
                self._tell_engine()

    async def aclose(self) -> None:
        """As :meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    async def _read(self) -> Chunk | None:
        while not self._answer.ended:
            if self._closed:
                raise RequestCancelled(CHAT_CLOSED)
            try:
                call = self._call or await self._start()
                async for response in call:
                    if (chunk := self._answer.take(response)) is not None:
                        return chunk
                self._answer.end()
            except CannotConnect as error:
                await self._retry(error)
            except MiniCPMOClientError as error:
                if self._call is not None and self._answer.goes_on_after(error):
                    self._call.cancel()
                    self._tell_engine()
                self._answer.fail(error)
            except asyncio.CancelledError:
                self.close()
                raise
        return None

    async def _start(self) -> AsyncCall:
        self._loop = asyncio.get_running_loop()
        limit_s = self._deadline.remaining_s()
        if self._request is None:
            self._request = await self._build()
            if self._closed:
                raise RequestCancelled(CHAT_CLOSED)
            # The time for reading files is not the server's.
            self._deadline, limit_s = Deadline(self._limit_s), self._limit_s
        self._call = self._transport.start(self._request, limit_s)
        return self._call

    async def _retry(self, error: CannotConnect) -> None:
        """Start once more, or end with ``error`` where no retry or no time is left."""
        delay_s = self._deadline.next_delay_s(self._delays_s)
        if delay_s is None:
            self._answer.fail(error)
            return
        await asyncio.sleep(delay_s)
        if not self._closed:
            await self._start()

    def _tell_engine(self) -> None:
        if self._request is not None and not self._answer.finished:
            self._transport.notify(cancel_request(self._request), CANCEL_TIMEOUT_S)

    async def __aenter__(self) -> AsyncChatStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter shutdown the transport may be half gone; there is no one to tell.
        with contextlib.suppress(Exception):
            self._close_from_anywhere()

    def _close_from_anywhere(self) -> None:
        """As :meth:`close`, also for a garbage collector in another thread."""
        loop = self._loop
        if loop is None or self._closed or self._answer.ended:
            self._closed = True
        elif asyncio._get_running_loop() is loop:
            self.close()
        elif loop.is_closed():  # the connection went with it
            self._closed = True
            self._tell_engine()
        else:
            loop.call_soon_threadsafe(self.close)


class _Loop:
    """One ``async for`` over a stream; when it goes, however it is left, the stream is closed."""

    def __init__(self, stream: AsyncChatStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Loop:
        return self

    async def __anext__(self) -> Chunk:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stream._close_from_anywhere()
