"""The client: chats with a MiniCPM-o model on a Triton server, each a stream of chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from minicpmo_client.errors import (
    InvalidRequest,
    MiniCPMOClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from minicpmo_client.grpc_transport import GrpcTransport
from minicpmo_client.transport import Call, Transport
from minicpmo_client.wire import (
    Chat,
    Chunk,
    Messages,
    Request,
    Response,
    build_inputs,
    join_chunks,
    parse_chunk,
)

DEFAULT_URL = "localhost:8001"
DEFAULT_MODEL = "minicpmo"
DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 0.5


class ChatStream:
    """An answer under way: an iterator of :class:`Chunk`.

    Leaving a ``for`` loop early, leaving a ``with`` block, :meth:`close` and garbage collection all cancel
    what is still to come, and only this chat. One thread reads; any thread may close.

    >>> from minicpmo_client import Client, FakeTransport
    >>> fake = FakeTransport(["One", " two", " three"])
    >>> for chunk in Client(transport=fake).chat("Count", request_id="count-1"):
    ...     print(chunk.text)
    ...     break
    One
    >>> fake.cancelled
    ['count-1']
    """

    def __init__(self, call: Call, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._final_seen = False
        self._ended = False
        self._closed = False

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
        """Cancel what has not arrived. Reading on raises :class:`RequestCancelled`."""
        self._closed = True
        if not self._ended:
            self._call.cancel()

    def _read(self) -> Chunk | None:
        response = self._next_with_outputs()
        return None if response is None else parse_chunk(response.outputs)

    def _next_with_outputs(self) -> Response | None:
        if self._ended:
            return None
        if self._closed:
            raise RequestCancelled("the chat was closed before its answer was complete")
        try:
            # Read on past the final response: the server ends the stream, and there is nothing to cancel.
            for response in self._call:
                self._final_seen = self._final_seen or response.final
                if response.outputs:
                    return response
            self._ended = True
            if not self._final_seen:
                raise ServerError("the server ended the stream before the final response")
        except MiniCPMOClientError:
            self._ended = True
            if not self._final_seen:
                raise
        return None

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


class Client:
    """Chats with the model ``model`` of the Triton server at ``url`` (gRPC, ``host:port``).

    Connects on first use. Threads may share one client: every chat is its own stream, all on one
    connection. ``timeout_s`` is the longest one chat may take (None: no limit). ``transport`` takes the
    place of gRPC, as in the example.

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
        transport: Transport | None = None,
    ) -> None:
        _check_timeout(timeout_s)
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        self._transport: Transport = transport if transport is not None else GrpcTransport(url)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        images: Sequence[object] = (),
        audio: Sequence[object] = (),
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
        sampling: Mapping[str, Any] | None = None,
        media_parameters: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> ChatStream | Chat:
        """Ask, and stream the answer (or wait for all of it with ``stream=False``).

        Args:
            messages: a question, or messages in OpenAI's form. A part ``{"type": "image", "image": X}``
                carries an image, ``{"type": "audio", "audio": X}`` a recording: for X see ``images`` and
                ``audio``. Other parts (text, data URIs) go to the server as they are.
            images: images of a plain question, before its text: paths, bytes, uint8 arrays [H, W],
                [H, W, 3] or [H, W, 4], or Pillow images.
            audio: recordings of a plain question, after its images: paths, bytes, or ``(samples, rate)``
                with float32 or int16 samples [T] or [T, channels] and the rate in Hz.
            sampling: vLLM's sampling parameters, such as ``{"max_tokens": 64, "temperature": 0}``.
            media_parameters: such as ``{"max_slice_nums": 4, "enable_thinking": True}``.
            request_id: names the request in the server's log; made up where empty.
            timeout_s: for this chat, instead of the client's.

        Raises:
            InvalidRequest: at once if the client can tell; otherwise, like every
                :class:`MiniCPMOClientError`, while the answer is read.
        """
        _check_timeout(timeout_s)
        inputs = build_inputs(
            messages,
            images=images,
            audio=audio,
            sampling=sampling,
            media_parameters=media_parameters,
            stream=stream,
        )
        request = Request(self.model, request_id or uuid.uuid4().hex, inputs)
        call = self._transport.start(request, self.timeout_s if timeout_s is None else timeout_s)
        answer = ChatStream(call, request.request_id)
        return answer if stream else answer.read()

    def is_ready(self, timeout_s: float = 5.0) -> bool:
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
            if self.is_ready(min(max(remaining_s, _POLL_S), 5.0)):
                return
            if remaining_s <= _POLL_S:
                raise RequestTimeout(f"model {self.model} at {self.url} was not ready within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Cancel this client's chats and free its connection. The client cannot be used afterwards."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequest(f"timeout_s: expected seconds above 0 or None, got {timeout_s!r}")
