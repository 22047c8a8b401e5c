"""Transports without a server, for tests of code that uses a client."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minicpmo_client import wire
from minicpmo_client.errors import RequestCancelled
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import Chunk, Request, Response

Reply = str | Chunk | Mapping[str, Sequence[Any]] | Response | Exception


class _Fake:
    def __init__(
        self,
        replies: Iterable[Reply] = (),
        *,
        final: bool = True,
        ready: bool = True,
        tensors: Tensors | Exception | None = None,
    ) -> None:
        self.replies = [*replies, Response({}, final=True)] if final else list(replies)
        self.ready = ready
        self.tensors = tensors
        self.closed = False
        self.requests: list[Request] = []
        self.timeouts_s: list[float | None] = []
        self.cancelled: list[str] = []
        self.notices: list[Request] = []

    def notify(self, request: Request, timeout_s: float) -> None:
        self.notices.append(request)

    def _keep(self, request: Request, timeout_s: float | None) -> None:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)

    def _infer(self, request: Request, timeout_s: float | None) -> Tensors:
        self._keep(request, timeout_s)
        if isinstance(self.tensors, Exception):
            raise self.tensors
        return self.tensors or {}


class FakeTransport(_Fake):
    """A transport without a server.

    Every chat gets the same ``replies``: a text becomes one increment of one token, a :class:`Chunk` arrives
    as it is, a mapping becomes the outputs of a response, a :class:`Response` is passed on and an exception
    is raised. A final response follows unless ``final`` is False. ``tensors`` (or an exception) answers each
    request of ``Client.embed``.

    ``requests`` keeps what was sent, ``timeouts_s`` the seconds each had, ``cancelled`` the ids of chats
    given up, and ``notices`` the requests sent in the background, which abort a generation.

    >>> from minicpmo_client import Client
    >>> fake = FakeTransport(["A ", "cat."])
    >>> Client(transport=fake).chat("What is this?", stream=False).text
    'A cat.'
    >>> fake.requests[0].inputs["messages"]
    [b'[{"role": "user", "content": "What is this?"}]']
    """

    def start(self, request: Request, timeout_s: float | None) -> _FakeCall:
        self._keep(request, timeout_s)
        return _FakeCall(self, request.request_id)

    def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        return self._infer(request, timeout_s)

    def model_ready(self, model: str, timeout_s: float) -> bool:
        return self.ready

    def close(self) -> None:
        self.closed = True


class AsyncFakeTransport(_Fake):
    """As :class:`FakeTransport`, for :class:`AsyncClient`.

    >>> import asyncio
    >>> from minicpmo_client import AsyncClient
    >>> fake = AsyncFakeTransport(["A ", "cat."])
    >>> asyncio.run(AsyncClient(transport=fake).chat("What is this?", stream=False)).text
    'A cat.'
    """

    def start(self, request: Request, timeout_s: float | None) -> _AsyncFakeCall:
        self._keep(request, timeout_s)
        return _AsyncFakeCall(_FakeCall(self, request.request_id))

    async def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        await asyncio.sleep(0)
        return self._infer(request, timeout_s)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        return self.ready

    async def close(self) -> None:
        self.closed = True


class _FakeCall:
    def __init__(self, transport: _Fake, request_id: str) -> None:
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
            reply = Chunk(reply, num_output_tokens=1)
        if isinstance(reply, Chunk):
            return Response(_outputs_of(reply))
        return reply if isinstance(reply, Response) else Response(reply)

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._transport.cancelled.append(self._request_id)


def _outputs_of(chunk: Chunk) -> dict[str, Sequence[Any]]:
    """The outputs that :func:`wire.parse_chunk` reads as ``chunk``."""
    logprob = chunk.cumulative_logprob
    return {
        wire.TEXT_OUTPUT: [chunk.text.encode()],
        wire.REASONING_OUTPUT: [chunk.reasoning.encode()],
        wire.FINISH_REASON: [(chunk.finish_reason or "").encode()],
        wire.CUMULATIVE_LOGPROB: [math.nan if logprob is None else logprob],
        wire.LOGPROBS: [json.dumps(chunk.logprobs).encode()],
        wire.NUM_INPUT_TOKENS: [chunk.num_input_tokens],
        wire.NUM_OUTPUT_TOKENS: [chunk.num_output_tokens],
    }


class _AsyncFakeCall:
    def __init__(self, call: _FakeCall) -> None:
        self._call = call
        self.cancel = call.cancel

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        await asyncio.sleep(0)
        try:
            return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None
