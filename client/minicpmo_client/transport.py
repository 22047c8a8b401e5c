"""What a client needs from a transport. Tests, and later HTTP, put another one in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from minicpmo_client import wire
from minicpmo_client.errors import RequestCancelled
from minicpmo_client.wire import Request, Response


class Call(Protocol):
    """One request under way: an iterator over its responses that ends when the server has ended it.

    ``__next__`` raises the errors of :mod:`minicpmo_client.errors` and nothing else.
    """

    def __iter__(self) -> Iterator[Response]: ...

    def __next__(self) -> Response: ...

    def cancel(self) -> None:
        """Give the request up. Never blocks, may come from any thread, at any time, more than once."""


class Transport(Protocol):
    """A connection that many threads share."""

    def start(self, request: Request, timeout_s: float | None) -> Call:
        """Send ``request``; it has ``timeout_s`` seconds for all its responses (None: no limit)."""

    def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether the server answers and serves ``model``; :class:`ServerUnavailable` without a server."""

    def close(self) -> None:
        """Cancel what is under way and free the connection."""


Reply = str | Mapping[str, Sequence[Any]] | Response | Exception


class FakeTransport:
    """A transport without a server, for tests of code that uses a client.

    Every chat gets the same ``replies``: a text becomes one increment of one token, a mapping the outputs
    of a response, a :class:`Response` is passed on and an exception is raised. A final response follows
    unless ``final`` is False. ``requests`` keeps what was sent, ``cancelled`` the ids of requests given up.

    >>> from minicpmo_client import Client
    >>> fake = FakeTransport(["A ", "cat."])
    >>> Client(transport=fake).chat("What is this?", stream=False).text
    'A cat.'
    >>> fake.requests[0].inputs["messages"]
    [b'[{"role": "user", "content": "What is this?"}]']
    """

    def __init__(self, replies: Iterable[Reply] = (), *, final: bool = True, ready: bool = True) -> None:
        self.replies = [*replies, Response({}, final=True)] if final else list(replies)
        self.ready = ready
        self.closed = False
        self.requests: list[Request] = []
        self.timeouts_s: list[float | None] = []
        self.cancelled: list[str] = []

    def start(self, request: Request, timeout_s: float | None) -> _FakeCall:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        return _FakeCall(self, request.request_id)

    def model_ready(self, model: str, timeout_s: float) -> bool:
        return self.ready

    def close(self) -> None:
        self.closed = True


class _FakeCall:
    def __init__(self, transport: FakeTransport, request_id: str) -> None:
        self._transport = transport
        self._request_id = request_id
        self._replies = iter(transport.replies)
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        if self._is_cancelled:
            raise RequestCancelled("the chat was cancelled")
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            return Response({wire.TEXT_OUTPUT: [reply.encode()], wire.NUM_OUTPUT_TOKENS: [1]})
        return reply if isinstance(reply, Response) else Response(reply)

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._transport.cancelled.append(self._request_id)
