"""Chats over gRPC: one stream a chat, all on one channel.

tritonclient's generated stub is used directly rather than its ``InferenceServerClient``: that one allows
one stream at a time, reads it in a thread that keeps an interpreter from exiting while a stream is
open, and joins this thread on cancelling, which a garbage collector must not do. With the stub the
caller's own thread reads, and cancelling never blocks.

Errors arrive inside the stream, as text without a code. The header ``triton_grpc_error: true`` would keep
the code, but Triton 2.51 ends with a segmentation fault within a few errors that follow a response of
their stream when it is set: one client's bad request would cost everybody the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minicpmo_client import grpc_wire
from minicpmo_client.courier import Courier
from minicpmo_client.errors import MiniCPMOClientError
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import Request, Response


class GrpcTransport:
    """A channel to ``url`` (``host:port``, ``grpc://`` or, with TLS, ``grpcs://``).

    Connects on first use and again after a loss.
    """

    def __init__(self, url: str) -> None:
        address = grpc_wire.grpc_address(url)
        self._target = address.target
        options = grpc_wire.CHANNEL_OPTIONS
        if address.tls:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(address.target, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(address.target, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # A stream of one message each way is, on the wire, a unary call; this one needs no reader.
        self._stream_once = self._channel.unary_unary(
            grpc_wire.STREAM_METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self._courier = Courier()

    def start(self, request: Request, timeout_s: float | None) -> GrpcCall:
        message = grpc_wire.to_message(request)
        self.prepare_to_notify()
        # One message, then the stream is half closed: the server ends it after the final response.
        rpc = self._call(
            lambda: self._stub.ModelStreamInfer(iter((message,)), timeout=timeout_s),
            timeout_s,
        )
        return GrpcCall(rpc, self, timeout_s)

    def infer(self, request: Request, timeout_s: float | None) -> Tensors:
        message = grpc_wire.to_message(request)
        reply = self._call(lambda: self._stub.ModelInfer(message, timeout=timeout_s), timeout_s)
        return grpc_wire.to_tensors(reply)

    def prepare_to_notify(self) -> None:
        """Before the first :meth:`notify`, which may come from a garbage collector."""
        self._courier.start()

    def notify(self, request: Request, timeout_s: float) -> None:
        message = grpc_wire.to_message(request)
        self._courier.post(lambda: self._stream_once(message, timeout=timeout_s))

    def model_ready(self, model: str, timeout_s: float) -> bool:
        question = service_pb2.ModelReadyRequest(name=model)
        reply = self._call(lambda: self._stub.ModelReady(question, timeout=timeout_s), timeout_s)
        return bool(reply.ready)

    def close(self) -> None:
        self._courier.drain()
        self._channel.close()

    def to_error(self, error: Any, timeout_s: float | None) -> MiniCPMOClientError:
        return grpc_wire.to_error(error, self._target, timeout_s)

    def _call(self, rpc: Callable[[], Any], timeout_s: float | None) -> Any:
        try:
            return rpc()
        except grpc.RpcError as error:
            raise self.to_error(error, timeout_s) from None
        except ValueError:  # what gRPC raises on a closed channel
            raise MiniCPMOClientError(grpc_wire.CLOSED) from None


class GrpcCall:
    """The responses of one stream. It keeps its transport, and so the channel, alive."""

    def __init__(self, rpc: Any, transport: GrpcTransport, timeout_s: float | None) -> None:
        self._rpc = rpc
        self._transport = transport
        self._timeout_s = timeout_s

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        try:
            message = next(self._rpc)
        except grpc.RpcError as error:
            raise self._transport.to_error(error, self._timeout_s) from None
        if message.error_message:
            self._read_to_the_end()
        return grpc_wire.to_response(message)

    def _read_to_the_end(self) -> None:
        """Wait for the server to end a stream whose request has failed, which it does at once.

        Cancelled before that, the request can stay in Triton (2.51) for ever, and holds up its end.
        """
        with contextlib.suppress(grpc.RpcError):
            for _ in self._rpc:
                pass

    def cancel(self) -> None:
        self._rpc.cancel()
