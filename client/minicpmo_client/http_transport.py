"""Chats over HTTP with the standard library: one connection a request.

A kept-alive connection that the server has just closed fails only after the request has left, and then
nobody can tell whether it arrived. Connections of their own keep ``CannotConnect`` a promise.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections import deque
from collections.abc import Iterator

from minicpmo_client import http_wire
from minicpmo_client.address import Address
from minicpmo_client.courier import Courier
from minicpmo_client.errors import CHAT_CLOSED, MiniCPMOClientError, RequestCancelled, RequestTimeout
from minicpmo_client.http_wire import Exchange, ReplyReader
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import Request, Response

_READ_BYTES = 2**16


class HttpTransport:
    """The HTTP endpoint at ``url`` (``http://host:port``, or ``https://`` behind a proxy)."""

    def __init__(self, url: str) -> None:
        self._address = http_wire.http_address(url)
        self._courier = Courier()
        self._calls: set[HttpCall] = set()
        self._closed = False

    def start(self, request: Request, timeout_s: float | None) -> HttpCall:
        self._check_open()
        exchange = http_wire.chat_exchange(request)
        self.prepare_to_notify()
        call = HttpCall(self._address, exchange, timeout_s, self._calls)
        call.send()
        return call

    def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        self._check_open()
        return run(self._address, http_wire.infer_exchange(request), timeout_s, self._calls).tensors()

    def prepare_to_notify(self) -> None:
        """Before the first :meth:`notify`, which may come from a garbage collector."""
        self._courier.start()

    def notify(self, request: Request, timeout_s: float) -> None:
        exchange, address = http_wire.notice_exchange(request), self._address
        self._courier.post(lambda: run(address, exchange, timeout_s))

    def model_ready(self, model: str, timeout_s: float) -> bool:
        self._check_open()
        status, _ = run(self._address, http_wire.ready_exchange(model), timeout_s).text()
        return status == 200

    def close(self) -> None:
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        self._courier.drain()

    def _check_open(self) -> None:
        if self._closed:
            raise MiniCPMOClientError("the client is closed")


def run(
    address: Address, exchange: Exchange, timeout_s: float | None, live: set[HttpCall] | None = None
) -> ReplyReader:
    """One exchange from its beginning to its end; what the reply says is left to the caller.

    ``live`` holds the call while it is under way, for whoever wants to cancel it.
    """
    call = HttpCall(address, exchange, timeout_s, set() if live is None else live)
    call.send()
    try:
        call.read_all()
    finally:
        call.cancel()
    return call.reply


class HttpCall:
    """The responses of one exchange. What goes wrong while sending is raised while reading."""

    def __init__(
        self, address: Address, exchange: Exchange, timeout_s: float | None, live: set[HttpCall]
    ) -> None:
        self.reply = ReplyReader(exchange)
        self._address = address
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._connection = _connection(address)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._num_left: int | None = None
        self._reading = False
        self._ready: deque[Response | MiniCPMOClientError] = deque()
        self._ended = False
        self._cancelled = False
        self._live = live

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        while not self._ready:
            if self._ended:
                raise StopIteration
            if self._read():
                self._ready.append(self.reply.end())
        item = self._ready.popleft()
        if isinstance(item, MiniCPMOClientError):
            self._ready.clear()
            self._end()
            raise item
        return item

    def send(self) -> None:
        """Connect and send. Errors are kept for the reader."""
        self._live.add(self)
        try:
            self._connect()
            self._send()
        except MiniCPMOClientError as error:
            self._ready.append(error)

    def read_all(self) -> None:
        """Read the whole reply into ``reply``."""
        if self._ready and isinstance(error := self._ready[0], MiniCPMOClientError):
            raise error
        while not self._read():
            pass

    def cancel(self) -> None:
        self._cancelled = True
        self._live.discard(self)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # wakes a thread that reads; close() would not
                self._socket.shutdown(socket.SHUT_RDWR)
        if not self._reading:
            self._end()

    def _connect(self) -> None:
        self._connection.timeout = self._remaining_s()
        try:
            self._connection.connect()
        except OSError as error:
            self._connection.close()
            raise http_wire.no_connection(self._address, error) from None
        self._socket = self._connection.sock
        if self._cancelled:
            self.cancel()

    def _send(self) -> None:
        exchange = self._exchange
        try:
            self._limit_wait()
            headers = {**exchange.headers, "Accept-Encoding": "identity"}
            self._connection.request(
                exchange.method, f"{self._address.path}{exchange.path}", exchange.body or None, headers
            )
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            # A server that refuses a request may answer and hang up before all of it has arrived.
            with contextlib.suppress(MiniCPMOClientError):
                self._open_reply()
                return
            raise self._lost(error) from None

    def _open_reply(self) -> http.client.HTTPResponse:
        try:
            self._limit_wait()
            response = self._connection.getresponse()
        except TimeoutError:
            raise self._late() from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        headers = {name.lower(): value for name, value in response.headers.items()}
        self.reply.head(response.status, headers)
        self._response, self._num_left = response, response.length
        return response

    def _read(self) -> bool:
        """Read once, and keep what became complete; whether the reply has ended."""
        self._reading = True
        try:
            data = self._read_once()
            self._ready.extend(self.reply.feed(data))
        except MiniCPMOClientError:
            self._end()
            raise
        finally:
            self._reading = False
        if not data or self._num_left == 0:
            self._end()
            return True
        return False

    def _read_once(self) -> bytes:
        try:
            if self._cancelled:
                raise self._lost(EOFError())
            response = self._response or self._open_reply()
            if self._num_left == 0:
                return b""
            self._limit_wait()
            # The count is kept here: http.client does not mind a body that is cut off, and before
            # Python 3.12 read1() waits for more than the body holds.
            data = response.read1(min(_READ_BYTES, self._num_left or _READ_BYTES))
        except TimeoutError:
            raise self._late() from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        if self._num_left is not None:
            if not data:
                raise self._lost(EOFError("the reply is cut off"))
            self._num_left -= len(data)
        return data

    def _end(self) -> None:
        self._ended = True
        self._live.discard(self)
        with contextlib.suppress(RuntimeError, ValueError):  # from a garbage collector, in mid-read
            self._connection.close()
            if self._response is not None:
                self._response.close()

    def _limit_wait(self) -> None:
        if self._socket is not None:
            self._socket.settimeout(self._remaining_s())

    def _remaining_s(self) -> float | None:
        if self._deadline is None:
            return None
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise self._late()
        return remaining_s

    def _late(self) -> RequestTimeout:
        return http_wire.late(self._address, self._timeout_s)

    def _lost(self, error: BaseException) -> MiniCPMOClientError:
        if self._cancelled:
            return RequestCancelled(CHAT_CLOSED)
        return http_wire.lost(self._address, error)


def _connection(address: Address) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    return kind(address.host, address.port)
