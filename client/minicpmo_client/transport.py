"""What the clients need from a transport. Tests, and proxies of one's own, put another one in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from minicpmo_client.wire import Request, Response

#: Output name -> array. BF16 arrives as float32.
Tensors = Mapping[str, npt.NDArray[Any]]


class Call(Protocol):
    """One request under way: an iterator over its responses that ends when the server has ended it.

    ``__next__`` raises the errors of :mod:`minicpmo_client.errors` and nothing else;
    :class:`CannotConnect` promises that nothing was sent.
    """

    def __iter__(self) -> Iterator[Response]: ...

    def __next__(self) -> Response: ...

    def cancel(self) -> None:
        """Give the request up. Never blocks, may come from any thread, at any time, more than once."""


class Transport(Protocol):
    """A connection that many threads share."""

    def start(self, request: Request, timeout_s: float | None) -> Call:
        """Send ``request``; it has ``timeout_s`` seconds for all its responses (None: no limit)."""

    def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        """The outputs of a model that answers one request with one response."""

    def notify(self, request: Request, timeout_s: float) -> None:
        """Send a request in the background; whether it arrives is not told. Never blocks or raises."""

    def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether the server answers and serves ``model``; :class:`ServerUnavailable` without a server."""

    def close(self) -> None:
        """Cancel what is under way and free the connection; notices get five seconds to leave."""


class AsyncCall(Protocol):
    """As :class:`Call`, for asyncio. All methods belong to the event loop's thread."""

    def __aiter__(self) -> AsyncIterator[Response]: ...

    async def __anext__(self) -> Response: ...

    def cancel(self) -> None:
        """Give the request up. Never blocks, may come at any time, more than once."""


class AsyncTransport(Protocol):
    """As :class:`Transport`, for asyncio. All methods belong to the event loop's thread."""

    def start(self, request: Request, timeout_s: float | None) -> AsyncCall:
        """Send ``request``; it has ``timeout_s`` seconds for all its responses (None: no limit)."""

    async def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        """The outputs of a model that answers one request with one response."""

    def notify(self, request: Request, timeout_s: float) -> None:
        """Send a request in the background; whether it arrives is not told. Never blocks or raises."""

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether the server answers and serves ``model``; :class:`ServerUnavailable` without a server."""

    async def close(self) -> None:
        """Cancel what is under way and free the connection; notices get five seconds to leave."""
