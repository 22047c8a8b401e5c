"""Chats over gRPC: one stream a chat, all on one channel.

tritonclient's generated stub is used directly rather than its ``InferenceServerClient``: that one allows
one stream at a time, reads it in a thread that keeps an interpreter from exiting while a stream is
open, and joins this thread on cancelling, which a garbage collector must not do. With the stub the
caller's own thread reads, cancelling never blocks, and every stream ends in a true status.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from minicpmo_client.errors import InvalidRequest, MiniCPMOClientError, from_server
from minicpmo_client.wire import INPUTS, InputValue, Request, Response

MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # While a server starts, a caller who asks again must not wait out gRPC's two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
# Without this header Triton puts an error's text into the stream and drops its code.
_STREAM_METADATA = (("triton_grpc_error", "true"),)
# How gRPC itself words that there is no server; any other UNAVAILABLE is the server's own.
_NO_CONNECTION = re.compile(r"failed to connect to all addresses|DNS resolution|errors resolving")
_LOST_CONNECTION = re.compile(r"Stream removed|Socket closed|recvmsg|Connection reset")
_REASON = re.compile(
    r"Connection refused|Connection reset|No route to host|timed out|Socket closed|Domain name not found"
)
_CLOSED = "the client is closed"


class GrpcTransport:
    """A channel to ``url`` (``host:port``). Connects on first use and again after a loss."""

    def __init__(self, url: str) -> None:
        if "://" in url or not url:
            raise InvalidRequest(f"url: expected host:port, such as localhost:8001, got {url!r}")
        self._url = url
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def start(self, request: Request, timeout_s: float | None) -> GrpcCall:
        message = _to_message(request)
        try:
            # One message, then the stream is half closed: the server ends it after the final response.
            rpc = self._stub.ModelStreamInfer(iter((message,)), metadata=_STREAM_METADATA, timeout=timeout_s)
        except ValueError:  # what gRPC raises on a closed channel
            raise MiniCPMOClientError(_CLOSED) from None
        return GrpcCall(rpc, self, timeout_s)

    def model_ready(self, model: str, timeout_s: float) -> bool:
        try:
            reply = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout_s)
        except grpc.RpcError as error:
            raise self.to_error(error, timeout_s) from None
        except ValueError:
            raise MiniCPMOClientError(_CLOSED) from None
        return bool(reply.ready)

    def close(self) -> None:
        self._channel.close()

    def to_error(self, error: Any, timeout_s: float | None) -> MiniCPMOClientError:
        """What a failed RPC means: the server's text, or what happened on the way to it."""
        code, text = error.code().name, error.details() or ""
        if code == "UNAVAILABLE" and _NO_CONNECTION.match(text):
            reason = _REASON.search(text)
            text = f"cannot connect to {self._url}: {reason.group() if reason else text}"
        elif code == "UNAVAILABLE" and _LOST_CONNECTION.match(text):
            text = f"lost the connection to {self._url}: {text}"
        elif code == "DEADLINE_EXCEEDED" and "Deadline Exceeded" in text and timeout_s is not None:
            text = f"no complete answer from {self._url} within {timeout_s:g} s"
        elif code == "CANCELLED" and text in ("Locally cancelled by application!", "Channel closed!"):
            text = "the chat was closed before its answer was complete"
        return from_server(code, text)


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
            raise from_server(None, message.error_message)
        return _from_message(message.infer_response)

    def cancel(self) -> None:
        self._rpc.cancel()


def _to_message(request: Request) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    # So that the final flag arrives also where the model ends a request without a last output.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    num_bytes = 0
    for name, value in request.inputs.items():
        shape, raw = _to_raw(value)
        message.inputs.add(name=name, datatype=INPUTS[name], shape=shape)
        message.raw_input_contents.append(raw)
        num_bytes += len(raw)
    if num_bytes > MAX_MESSAGE_BYTES - 2**16:
        raise InvalidRequest(f"the request holds {num_bytes} bytes, more than gRPC carries (2 GiB)")
    return message


def _to_raw(value: InputValue) -> tuple[list[int], bytes]:
    """Shape and bytes of a tensor: a BOOL is one byte, a BYTES element follows its 32-bit length."""
    if isinstance(value, bool):
        return [1], struct.pack("?", value)
    return [len(value)], b"".join(part for item in value for part in (struct.pack("<I", len(item)), item))


def _from_message(message: Any) -> Response:
    result = InferResult(message)
    outputs: dict[str, Sequence[Any]] = {
        output.name: result.as_numpy(output.name).reshape(-1).tolist() for output in message.outputs
    }
    final = message.parameters["triton_final_response"].bool_param
    return Response(outputs, final=final)
