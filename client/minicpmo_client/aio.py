"""The client for asyncio."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from minicpmo_client import embeddings, http_aio, stats
from minicpmo_client.aio_stream import AsyncChatStream
from minicpmo_client.conversation import Messages
from minicpmo_client.embeddings import Embeddings
from minicpmo_client.errors import CannotConnect, MiniCPMOClientError, RequestTimeout, ServerUnavailable
from minicpmo_client.grpc_aio import AsyncGrpcTransport
from minicpmo_client.settings import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    READY_TIMEOUT_S,
    STATS_TIMEOUT_S,
    Deadline,
    Settings,
    readiness_polls,
)
from minicpmo_client.stats import Stats
from minicpmo_client.transport import AsyncTransport
from minicpmo_client.wire import (
    DEFAULT_MODEL,
    Chat,
    Request,
    build_inputs,
    chat_request,
    retry_delays_s,
)


class AsyncClient:
    """:class:`Client` for asyncio; arguments, answers and errors are the same.

    It belongs to the event loop of its first use. Cancelling a task that reads an answer cancels the chat.
    ``close()`` is a coroutine; leaving ``async with`` calls it and so lets cancels reach the engine.

    >>> import asyncio
    >>> from minicpmo_client import AsyncClient, AsyncFakeTransport
    >>> async def main():
    ...     async with AsyncClient(transport=AsyncFakeTransport(["A cat ", "on a mat."])) as client:
    ...         async for chunk in client.chat("Describe the picture.", images=[b"bytes of a PNG file"]):
    ...             print(chunk.text, end="")
    >>> asyncio.run(main())
    A cat on a mat.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int = 0,
        fetch_urls: bool = False,
        metrics_url: str = "",
        transport: AsyncTransport | None = None,
    ) -> None:
        self.settings = Settings(url, model, timeout_s, retries, fetch_urls, metrics_url)
        self.url, self.model = url, model
        if transport is None:
            is_http = self.settings.is_http
            transport = http_aio.AsyncHttpTransport(url) if is_http else AsyncGrpcTransport(url)
        self._transport: AsyncTransport = transport
        self._streams: weakref.WeakSet[AsyncChatStream] = weakref.WeakSet()

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
        videos: Sequence[object] = (),
        sampling: Mapping[str, Any] | None = None,
        media_parameters: Mapping[str, Any] | None = None,
        stream: Literal[True] = True,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncChatStream: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
        videos: Sequence[object] = (),
        sampling: Mapping[str, Any] | None = None,
        media_parameters: Mapping[str, Any] | None = None,
        stream: Literal[False],
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, Chat]: ...

    def chat(
        self,
        messages: Messages,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
        videos: Sequence[object] = (),
        sampling: Mapping[str, Any] | None = None,
        media_parameters: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncChatStream | Coroutine[Any, Any, Chat]:
        """Ask: ``async for`` over the answer, or ``await`` all of it with ``stream=False``.

        The arguments are those of :meth:`Client.chat`. The request is built, in a thread, and sent when
        the answer is first read or awaited; errors of the request are raised there too.
        """
        limit_s = self.settings.limit_s(timeout_s)
        request_id = request_id or uuid.uuid4().hex

        def build() -> Request:
            inputs = build_inputs(
                messages,
                images=images,
                audio=audio,
                videos=videos,
                sampling=sampling,
                media_parameters=media_parameters,
                stream=stream,
                fetch=self.settings.fetch,
            )
            return chat_request(self.model, request_id, inputs)

        answer = AsyncChatStream(
            self._transport,
            lambda: asyncio.to_thread(build),
            request_id,
            limit_s,
            retry_delays_s(self.settings.retries),
        )
        self._streams.add(answer)
        return answer if stream else answer.read()

    async def embed(
        self,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
        media_parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """As :meth:`Client.embed`."""
        limit_s = self.settings.limit_s(timeout_s)
        items = await asyncio.to_thread(
            embeddings.build_items, images, audio, media_parameters, self.settings.fetch
        )
        in_flight = asyncio.Semaphore(embeddings.MAX_IN_FLIGHT)
        tasks = [asyncio.ensure_future(self._embed_one(item, limit_s, in_flight)) for item in items]
        try:
            return embeddings.collect(items, await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed_one(
        self, item: embeddings.Item, limit_s: float | None, in_flight: asyncio.Semaphore
    ) -> embeddings.FloatArray:
        async with in_flight:
            deadline, delays_s = Deadline(limit_s), retry_delays_s(self.settings.retries)
            while True:
                try:
                    tensors = await self._transport.infer(item.request, deadline.remaining_s())
                    break
                except CannotConnect:
                    if (delay_s := deadline.next_delay_s(delays_s)) is None:
                        raise
                    await asyncio.sleep(delay_s)
                except MiniCPMOClientError as error:
                    raise embeddings.renamed(item, error) from None
            return embeddings.rows_of(item, tensors)

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> Stats:
        """As :meth:`Client.stats`."""
        url = self.settings.where_metrics_are()
        address, exchange = stats.metrics_exchange(url)
        return stats.stats_from(await http_aio.run(address, exchange, timeout_s), url)

    async def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server serves the model now; False also where no server answers."""
        try:
            return await self._transport.model_ready(self.model, timeout_s)
        except (ServerUnavailable, RequestTimeout):
            return False

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server serves the model; :class:`RequestTimeout` if not so within ``timeout_s``."""
        for limit_s, pause_s in readiness_polls(self.model, self.url, timeout_s):
            if await self.is_ready(limit_s):
                return
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """As :meth:`Client.close`."""
        for stream in list(self._streams):
            stream.close()
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
