"""What both gRPC transports share: messages, channel options, and what a failed RPC means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from minicpmo_client.address import Address, parse_address
from minicpmo_client.errors import (
    CHAT_CLOSED,
    CannotConnect,
    InvalidRequest,
    MiniCPMOClientError,
    from_server,
    lost_connection,
)
from minicpmo_client.tensors import decode_tensor, encode_input
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import INPUTS, Request, Response

MAX_MESSAGE_BYTES = 2**31 - 1  # protobuf's own limit

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # While a server starts, a caller who asks again must not wait out gRPC's two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # In spite of its name how long a connection may take to come about, TLS and HTTP/2 included.
    ("grpc.min_reconnect_backoff_ms", 10_000),
)
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
# How gRPC itself words that there is no server; any other UNAVAILABLE is the server's own.
_NO_CONNECTION = re.compile(r"failed to connect to all addresses|DNS resolution|errors resolving")
_LOST_CONNECTION = re.compile(r"Stream removed|Socket closed|recvmsg|Connection reset")
_REASON = re.compile(
    r"Connection refused|Connection reset|No route to host|timed out|Socket closed|Domain name not found"
)
CLOSED = "the client is closed"


def grpc_address(url: str) -> Address:
    """The address of a gRPC endpoint; :class:`InvalidRequest` for anything else."""
    address = parse_address(url)
    if address.protocol != "grpc":
        raise InvalidRequest(f"url: expected host:port, such as localhost:8001, got {url!r}")
    return address


def to_message(request: Request) -> Any:
    """The ``ModelInferRequest`` that carries ``request``."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    # So that the final flag arrives also where the model ends a request without a last output.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    num_bytes = 0
    for name, value in request.inputs.items():
        shape, raw = encode_input(value)
        message.inputs.add(name=name, datatype=INPUTS[name], shape=shape)
        message.raw_input_contents.append(raw)
        num_bytes += len(raw)
    if num_bytes > MAX_MESSAGE_BYTES - 2**16:
        raise InvalidRequest(f"the request holds {num_bytes} bytes, more than gRPC carries (2 GiB)")
    return message


def to_tensors(message: Any) -> Tensors:
    """The outputs of a ``ModelInferResponse``."""
    pairs = zip(message.outputs, message.raw_output_contents, strict=False)
    return {output.name: decode_tensor(output.datatype, list(output.shape), raw) for output, raw in pairs}


def to_response(message: Any) -> Response:
    """What a ``ModelStreamInferResponse`` carries; raises the error it reports."""
    if message.error_message:
        raise from_server(None, message.error_message)
    reply = message.infer_response
    outputs: dict[str, Sequence[Any]] = {
        name: values.reshape(-1).tolist() for name, values in to_tensors(reply).items()
    }
    return Response(outputs, final=reply.parameters["triton_final_response"].bool_param)


def to_error(error: Any, target: str, timeout_s: float | None) -> MiniCPMOClientError:
    """What a failed RPC means: the server's text, or what happened on the way to it."""
    code, text = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" and _NO_CONNECTION.match(text):
        reason = _REASON.search(text)
        return CannotConnect(f"cannot connect to {target}: {reason.group() if reason else text}")
    if code == "UNAVAILABLE" and _LOST_CONNECTION.match(text):
        return lost_connection(target, text)
    if code == "DEADLINE_EXCEEDED" and "Deadline Exceeded" in text and timeout_s is not None:
        text = f"no complete answer from {target} within {timeout_s:g} s"
    elif code == "CANCELLED" and text in ("Locally cancelled by application!", "Channel closed!"):
        text = CHAT_CLOSED
    return from_server(code, text)
