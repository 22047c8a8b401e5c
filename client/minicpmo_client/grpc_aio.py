"""Chats over gRPC for asyncio; the stub is :mod:`minicpmo_client.grpc_transport`'s, on an ``aio`` channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minicpmo_client import grpc_wire
from minicpmo_client.errors import CHAT_CLOSED, MiniCPMOClientError, RequestCancelled
from minicpmo_client.grpc_transport import GrpcTransport
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import Request, Response


class AsyncGrpcTransport:
    """A channel to ``url`` that belongs to the event loop of its first use."""

    def __init__(self, url: str) -> None:
        self._address = grpc_wire.grpc_address(url)
        self._channel: Any = None
        self._stub: Any = None
        self._closed = False
        # Notices leave from a thread: the event loop may end, or be busy, right after a chat is given up.
        self._notices = GrpcTransport(url)

    def start(self, request: Request, timeout_s: float | None) -> AsyncGrpcCall:
        message = grpc_wire.to_message(request)
        self._notices.prepare_to_notify()
        rpc = self._connected().ModelStreamInfer(iter((message,)), timeout=timeout_s)
        return AsyncGrpcCall(rpc, self, timeout_s)

    async def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        rpc = self._connected().ModelInfer(grpc_wire.to_message(request), timeout=timeout_s)
        return grpc_wire.to_tensors(await self._answer(rpc, timeout_s))

    def notify(self, request: Request, timeout_s: float) -> None:
        self._notices.notify(request, timeout_s)

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        rpc = self._connected().ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout_s)
        return bool((await self._answer(rpc, timeout_s)).ready)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._notices.close)
        if self._channel is not None:
            await self._channel.close()

    def to_error(self, error: Any, timeout_s: float | None) -> MiniCPMOClientError:
        return grpc_wire.to_error(error, self._address.target, timeout_s)

    async def _answer(self, rpc: Any, timeout_s: float | None) -> Any:
        try:
            return await rpc
        except grpc.RpcError as error:
            raise self.to_error(error, timeout_s) from None

    def _connected(self) -> Any:
        if self._closed:
            raise MiniCPMOClientError(grpc_wire.CLOSED)
        if self._stub is None:  # a channel wants a running loop
            options = grpc_wire.CHANNEL_OPTIONS
            if self._address.tls:
                credentials = grpc.ssl_channel_credentials()
                self._channel = grpc.aio.secure_channel(self._address.target, credentials, options=options)
            else:
                self._channel = grpc.aio.insecure_channel(self._address.target, options=options)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub


class AsyncGrpcCall:
    """The responses of one stream."""

    def __init__(self, rpc: Any, transport: AsyncGrpcTransport, timeout_s: float | None) -> None:
        self._rpc = rpc
        self._transport = transport
        self._timeout_s = timeout_s
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        try:
            message = await self._rpc.read()
            if message is not grpc.aio.EOF and message.error_message:
                await self._read_to_the_end()
        except grpc.RpcError as error:
            raise self._transport.to_error(error, self._timeout_s) from None
        except asyncio.CancelledError:
            # gRPC raises it for a call cancelled by cancel() too, and that is not the task's end.
            if self._cancelled:
                raise RequestCancelled(CHAT_CLOSED) from None
            raise
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return grpc_wire.to_response(message)

    async def _read_to_the_end(self) -> None:
        """As of the call for threads: a request that has failed is not cancelled."""
        with contextlib.suppress(grpc.RpcError):
            while await self._rpc.read() is not grpc.aio.EOF:
                pass

    def cancel(self) -> None:
        self._cancelled = True
        self._rpc.cancel()
