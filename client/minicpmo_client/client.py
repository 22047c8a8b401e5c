"""The client: chats with a MiniCPM-o model on a Triton server, each a stream of chunks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, overload

from minicpmo_client import embeddings, http_transport, stats
from minicpmo_client.chat_stream import ChatStream
from minicpmo_client.conversation import Messages
from minicpmo_client.embeddings import Embeddings
from minicpmo_client.errors import CannotConnect, MiniCPMOClientError, RequestTimeout, ServerUnavailable
from minicpmo_client.grpc_transport import GrpcTransport
from minicpmo_client.settings import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    POLL_S,
    READY_TIMEOUT_S,
    STATS_TIMEOUT_S,
    Deadline,
    Settings,
)
from minicpmo_client.stats import Stats
from minicpmo_client.transport import Transport
from minicpmo_client.wire import (
    DEFAULT_MODEL,
    Chat,
    build_inputs,
    chat_request,
    retry_delays_s,
)


class Client:
    """Chats with the model ``model`` of the Triton server at ``url``.

    ``host:port`` or ``grpc://host:port`` is Triton's gRPC endpoint (8001), ``http://host:port`` its HTTP
    endpoint (8000). Connects on first use. Threads may share one client: every chat is its own stream.

    Args:
        timeout_s: the longest one chat may take (None: no limit).
        retries: how often to try again where no connection came about, so that nothing was sent; after
            0.2 s, 0.4 s, 0.8 s and so on up to 2 s, within ``timeout_s``. Nothing else is ever retried.
        fetch_urls: whether to fetch ``http(s)`` URLs in requests; refused otherwise. The server never does.
        metrics_url: for :meth:`stats`; by default port 8002 of the same host.
        transport: takes the place of gRPC and HTTP, as in the example.

    >>> from minicpmo_client import Client, FakeTransport
    >>> with Client(transport=FakeTransport(["A cat ", "on a mat."])) as client:
    ...     for chunk in client.chat("Describe the picture.", images=[b"bytes of a PNG file"]):
    ...         print(chunk.text, end="")
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
        transport: Transport | None = None,
    ) -> None:
        self.settings = Settings(url, model, timeout_s, retries, fetch_urls, metrics_url)
        self.url, self.model = url, model
        if transport is None:
            transport = http_transport.HttpTransport(url) if self.settings.is_http else GrpcTransport(url)
        self._transport: Transport = transport
        self._streams: weakref.WeakSet[ChatStream] = weakref.WeakSet()

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
    ) -> ChatStream: ...

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
    ) -> Chat: ...

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
    ) -> ChatStream | Chat:
        """Ask, and stream the answer (or wait for all of it with ``stream=False``).

        Args:
            messages: a question, or messages in OpenAI's form. A part ``{"type": "image", "image": X}``
                carries an image, and ``audio`` and ``video`` parts likewise: for X see ``images``,
                ``audio`` and ``videos``. Other parts (text, data URIs) go to the server as they are.
            images: images of a plain question, before its text: paths, bytes, URLs, uint8 arrays [H, W],
                [H, W, 3] or [H, W, 4], or Pillow images.
            audio: recordings of a plain question, after its images: paths, bytes, URLs, or
                ``(samples, rate)`` with float32 or int16 samples [T] or [T, channels] and the rate in Hz.
            videos: videos of a plain question, after its recordings: paths, bytes or URLs.
            sampling: vLLM's sampling parameters, such as ``{"max_tokens": 64, "temperature": 0}``.
            media_parameters: such as ``{"max_slice_nums": 4, "enable_thinking": True}``.
            request_id: names the request in the server's log, and must be unique among those under way:
                a cancel names it. Made up where empty.
            timeout_s: for this chat, instead of the client's.

        Raises:
            InvalidRequest: at once if the client can tell; otherwise, like every
                :class:`MiniCPMOClientError`, while the answer is read.
        """
        limit_s = self.settings.limit_s(timeout_s)
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
        request = chat_request(self.model, request_id, inputs)
        answer = ChatStream(self._transport, request, limit_s, retry_delays_s(self.settings.retries))
        self._streams.add(answer)
        return answer if stream else answer.read()

    def embed(
        self,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
        media_parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Embeddings of images and recordings as the language model gets them, from the ``encode`` model.

        One request each, up to eight at once; ``timeout_s`` is for each. The first error ends it, and its
        message names the image or recording.

        >>> import numpy as np
        >>> from minicpmo_client import Client, FakeTransport
        >>> fake = FakeTransport(tensors={"image_embeds": np.zeros((64, 8), np.float32)})
        >>> [rows.shape for rows in Client(transport=fake).embed(images=[b"png", b"jpeg"]).images]
        [(64, 8), (64, 8)]
        """
        limit_s = self.settings.limit_s(timeout_s)
        items = embeddings.build_items(images, audio, media_parameters, self.settings.fetch)
        if not items:
            return Embeddings()
        threads = ThreadPoolExecutor(min(len(items), embeddings.MAX_IN_FLIGHT))
        try:
            waiting = [threads.submit(self._embed_one, item, limit_s) for item in items]
            return embeddings.collect(items, [result.result() for result in waiting])
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _embed_one(self, item: embeddings.Item, limit_s: float | None) -> embeddings.FloatArray:
        deadline, delays_s = Deadline(limit_s), retry_delays_s(self.settings.retries)
        while True:
            try:
                tensors = self._transport.infer(item.request, deadline.remaining_s())
                break
            except CannotConnect:
                delay_s = next(delays_s, None)
                if delay_s is None or not deadline.leaves(delay_s):
                    raise
                time.sleep(delay_s)
            except MiniCPMOClientError as error:
                raise embeddings.renamed(item, error) from None
        return embeddings.rows_of(item, tensors)

    def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> Stats:
        """The encoders' graph counters now, and every other sample, from the server's metrics endpoint.

        Raises:
            ServerUnavailable: nothing answers there; ``metrics_url`` may be needed.
        """
        url = self.settings.where_metrics_are()
        address, exchange = stats.metrics_exchange(url)
        return stats.stats_from(http_transport.run(address, exchange, timeout_s), url)

    def is_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the server serves the model now; False also where no server answers.

        >>> from minicpmo_client import Client, FakeTransport
        >>> Client(transport=FakeTransport(ready=False)).is_ready()
        False
        """
        try:
            return self._transport.model_ready(self.model, timeout_s)
        except (ServerUnavailable, RequestTimeout):
            return False

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server serves the model; :class:`RequestTimeout` if not so within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            if self.is_ready(min(max(remaining_s, POLL_S), READY_TIMEOUT_S)):
                return
            if remaining_s <= POLL_S:
                raise RequestTimeout(f"model {self.model} at {self.url} was not ready within {timeout_s:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Cancel this client's chats and free its connection. The client cannot be used afterwards.

        Waits up to five seconds for cancels on their way to the engine.
        """
        for stream in list(self._streams):
            stream.close()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
