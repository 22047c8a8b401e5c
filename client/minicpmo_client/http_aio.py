"""Chats over HTTP for asyncio, on its own streams: HTTP/1.1, one connection a request.

The standard library has no asyncio HTTP client. What is needed of one is small: write a request, read a
status, headers and a body that is chunked, counted or ends with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping

from minicpmo_client import http_wire
from minicpmo_client.address import Address
from minicpmo_client.errors import CHAT_CLOSED, MiniCPMOClientError, RequestCancelled
from minicpmo_client.http_transport import HttpTransport
from minicpmo_client.http_wire import Exchange, ReplyReader
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import Request, Response

_READ_BYTES = 2**16


class AsyncHttpTransport:
    """The HTTP endpoint at ``url``, for the event loop of its first use."""

    def __init__(self, url: str) -> None:
        self._address = http_wire.http_address(url)
        self._calls: set[AsyncHttpCall] = set()
        # Notices leave from a thread: the event loop may end, or be busy, right after a chat is given up.
        self._notices = HttpTransport(url)
        self._closed = False

    def start(self, request: Request, timeout_s: float | None) -> AsyncHttpCall:
        self._check_open()
        self._notices.prepare_to_notify()
        return AsyncHttpCall(self._address, http_wire.chat_exchange(request), timeout_s, self._calls)

    async def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        self._check_open()
        return (await run(self._address, http_wire.infer_exchange(request), timeout_s)).tensors()

    def notify(self, request: Request, timeout_s: float) -> None:
        self._notices.notify(request, timeout_s)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        self._check_open()
        status, _ = (await run(self._address, http_wire.ready_exchange(model), timeout_s)).text()
        return status == 200

    async def close(self) -> None:
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        await asyncio.to_thread(self._notices.close)

    def _check_open(self) -> None:
        if self._closed:
            raise MiniCPMOClientError("the client is closed")


async def run(address: Address, exchange: Exchange, timeout_s: float | None) -> ReplyReader:
    """One exchange from its beginning to its end; what the reply says is left to the caller."""
    call = AsyncHttpCall(address, exchange, timeout_s, set())
    try:
        while not await call.read():
            pass
    finally:
        call.cancel()
    return call.reply


class AsyncHttpCall:
    """The responses of one exchange. The request leaves at once, in a task of its own."""

    def __init__(
        self, address: Address, exchange: Exchange, timeout_s: float | None, live: set[AsyncHttpCall]
    ) -> None:
        self.reply = ReplyReader(exchange)
        self._address = address
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._ready: deque[Response | MiniCPMOClientError] = deque()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._body: AsyncIterator[bytes] | None = None
        self._ended = self._cancelled = self._late = False
        self._live = live
        live.add(self)
        loop = asyncio.get_running_loop()
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        self._sending = loop.create_task(self._send())
        # An answer that nobody reads has nobody to tell its failure to.
        self._sending.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            if await self.read():
                self._ready.append(self.reply.end())
        item = self._ready.popleft()
        if isinstance(item, MiniCPMOClientError):
            self._ready.clear()
            self._end()
            raise item
        return item

    async def read(self) -> bool:
        """Read once, and keep what became complete; whether the reply has ended."""
        try:
            await asyncio.shield(self._sending)
            if self._body is None:
                self._body = self._start_body(*await self._head())
            async for data in self._body:
                self._ready.extend(self.reply.feed(data))
                return False
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
            self._end()
            raise self._failure(error) from None
        except asyncio.CancelledError:
            if self._sending.cancelled() and (self._cancelled or self._late):
                self._end()
                raise self._failure(EOFError()) from None
            raise
        except MiniCPMOClientError:
            self._end()
            raise
        self._end()
        return True

    def cancel(self) -> None:
        self._cancelled = self._cancelled or not self._ended
        self._end()

    def _expire(self) -> None:
        self._late = True
        self._sending.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    def _end(self) -> None:
        self._ended = True
        self._live.discard(self)
        self._sending.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _send(self) -> None:
        address = self._address
        try:
            context = ssl.create_default_context() if address.tls else None
            self._reader, self._writer = await asyncio.open_connection(
                address.host, address.port, ssl=context
            )
        except OSError as error:
            raise http_wire.no_connection(address, error) from None
        self._writer.write(http_wire.request_head(address, self._exchange))
        self._writer.write(self._exchange.body)
        # A server that refuses a request may answer and hang up before all of it has arrived.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _head(self) -> tuple[int, Mapping[str, str]]:
        """Status and headers, those of interim replies (1xx) passed over."""
        assert self._reader is not None
        while True:
            line, _, lines = (await self._reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            version, status, *_ = [*line.split(b" ", 2), b""]
            if not version.startswith(b"HTTP/1.") or not status.isdigit():
                raise ValueError("the reply is not HTTP/1.1")
            if int(status) >= 200:
                fields = http.client.parse_headers(io.BytesIO(lines))
                headers = {name.lower(): value for name, value in fields.items()}
                self.reply.head(int(status), headers)
                return int(status), headers

    def _start_body(self, status: int, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        assert self._reader is not None
        if "chunked" in (headers.get("transfer-encoding") or "").lower():
            return _chunks(self._reader)
        length = headers.get("content-length")
        if status in (204, 304):
            length = "0"
        return _counted(self._reader, None if length is None else int(length))

    def _failure(self, error: BaseException) -> MiniCPMOClientError:
        if self._late:
            return http_wire.late(self._address, self._timeout_s)
        if self._cancelled:
            return RequestCancelled(CHAT_CLOSED)
        return http_wire.lost(self._address, error)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of a chunked body, in pieces of at most 64 KiB."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
            return
        async for data in _counted(reader, size):
            yield data
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk of the reply has a wrong length")


async def _counted(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """``length`` bytes, or all until the connection ends where it is None."""
    while length is None or length > 0:
        data = await reader.read(_READ_BYTES if length is None else min(length, _READ_BYTES))
        if not data:
            if length is None:
                return
            raise EOFError("the reply is cut off")
        if length is not None:
            length -= len(data)
        yield data
