"""What both HTTP transports share: requests as bytes, replies fed in as they arrive, errors.

Streamed answers use Triton's ``generate_stream`` (server-sent events, media as base64). Whole answers use
``infer`` with binary tensors on the model's unary sibling where there is one, and ``generate`` elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from minicpmo_client.address import Address, parse_address
from minicpmo_client.errors import (
    CannotConnect,
    InvalidRequest,
    MiniCPMOClientError,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    from_http,
    lost_connection,
)
from minicpmo_client.sse import EventParser
from minicpmo_client.tensors import decode_tensor, encode_input
from minicpmo_client.transport import Tensors
from minicpmo_client.wire import (
    INPUTS,
    MEDIA,
    OUTPUTS,
    STREAM,
    UNARY_MODELS,
    Request,
    Response,
    chat_request,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
_BASE64 = re.compile(rb"[A-Za-z0-9+/\s]+={0,2}\s*")

Kind = Literal["stream", "json", "infer", "raw"]


@dataclass(frozen=True)
class Exchange:
    """One HTTP request. ``kind`` says how to read the reply."""

    method: str
    path: str
    kind: Kind
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def http_address(url: str) -> Address:
    """The address of an HTTP endpoint; :class:`InvalidRequest` for anything else."""
    address = parse_address(url)
    if address.protocol != "http":
        raise InvalidRequest(f"url: expected http://host:port, such as http://localhost:8000, got {url!r}")
    return address


def chat_exchange(request: Request) -> Exchange:
    """The exchange of a chat: streamed, or whole where the request or the model says so."""
    if request.model in UNARY_MODELS.values():
        return infer_exchange(request)
    if not request.inputs.get(STREAM, True):
        unary_model = UNARY_MODELS.get(request.model)
        if unary_model is None:
            return _generate(request, "generate", "json")
        return infer_exchange(chat_request(unary_model, request.request_id, request.inputs))
    return _generate(request, "generate_stream", "stream")


def infer_exchange(request: Request) -> Exchange:
    """``infer`` with every tensor in binary, both ways."""
    tensors, parts = [], []
    for name, value in request.inputs.items():
        shape, raw = encode_input(value)
        size = {"binary_data_size": len(raw)}
        tensors.append({"name": name, "datatype": INPUTS[name], "shape": shape, "parameters": size})
        parts.append(raw)
    head = {"id": request.request_id, "inputs": tensors, "parameters": {"binary_data_output": True}}
    header = json.dumps(head).encode()
    headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
    return Exchange("POST", _model_path(request.model, "infer"), "infer", b"".join((header, *parts)), headers)


def notice_exchange(request: Request) -> Exchange:
    """A request whose answer holds no outputs, which ``generate`` would call an error."""
    return _generate(request, "generate_stream", "stream")


def ready_exchange(model: str) -> Exchange:
    return Exchange("GET", _model_path(model, "ready"), "raw")


def request_head(address: Address, exchange: Exchange) -> bytes:
    """The head of the HTTP/1.1 request, for transports that write it themselves."""
    lines = [f"{exchange.method} {address.path}{exchange.path} HTTP/1.1", f"Host: {address.netloc}"]
    lines += [f"{name}: {value}" for name, value in exchange.headers.items()]
    lines += [f"Content-Length: {len(exchange.body)}", "Accept-Encoding: identity", "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class ReplyReader:
    """A reply as it arrives: tell it the head, feed it the body, and take what has become complete."""

    def __init__(self, exchange: Exchange) -> None:
        self._kind = exchange.kind
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._events = EventParser()
        self._any_event = False
        self._body = bytearray()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """``headers`` has its names in lower case."""
        self._status, self._headers = status, headers

    def feed(self, data: bytes) -> list[Response | MiniCPMOClientError]:
        """The responses that ``data`` completes, up to an error, which ends the answer."""
        if self._kind != "stream" or self._status != 200:
            self._body += data
            return []
        found: list[Response | MiniCPMOClientError] = []
        for event in self._events.feed(data):
            self._any_event = True
            try:
                found.append(Response(self._json_outputs(event)))
            except MiniCPMOClientError as error:
                return [*found, error]
        return found

    def end(self) -> Response:
        """What the end of the body completes. Raises the error that the reply carries."""
        if self._status != 200:
            raise from_http(self._status, _error_text(bytes(self._body)), keeps_codes=self._kind == "infer")
        if self._kind == "stream":
            # Every answer has an event; a body without any may be a head that was cut off.
            return Response({}, final=self._any_event)
        if self._kind == "json":
            return Response(self._json_outputs(bytes(self._body)), final=True)
        outputs = {name: values.reshape(-1).tolist() for name, values in self.tensors().items()}
        return Response(outputs, final=True)

    def tensors(self) -> Tensors:
        """The outputs of an ``infer`` whose body is complete; raises the error that the reply carries."""
        body = bytes(self._body)
        if self._status != 200:
            raise from_http(self._status, _error_text(body), keeps_codes=True)
        try:
            at = int(self._headers.get(HEADER_LENGTH.lower()) or len(body))
            found = {}
            for output in json.loads(body[:at])["outputs"]:
                size = output["parameters"]["binary_data_size"]
                found[output["name"]] = decode_tensor(
                    output["datatype"], output["shape"], body[at : at + size]
                )
                at += size
        except (ValueError, KeyError, TypeError):
            raise ServerError("the server's reply to infer cannot be read") from None
        return found

    def text(self) -> tuple[int, str]:
        """Status and body of a reply that is no JSON."""
        return self._status, self._body.decode("utf-8", "replace")

    def _json_outputs(self, data: bytes) -> dict[str, list[Any]]:
        try:
            reply = json.loads(data)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise ServerError("the server sent something that is not a JSON object")
        if "error" in reply:  # status 200 where an error follows earlier responses
            raise from_http(200, str(reply["error"]), keeps_codes=False)
        found = {name: reply[name] for name in OUTPUTS if name in reply}
        return {name: value if isinstance(value, list) else [value] for name, value in found.items()}


def connect_problem(error: OSError) -> str:
    """Why no connection came about, in the system's words (asyncio puts its own around them).

    >>> connect_problem(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 8000)"))
    'Connection refused'
    """
    if type(error).__module__ == "builtins" and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error) or "timed out"


def no_connection(address: Address, error: OSError) -> CannotConnect:
    return CannotConnect(f"cannot connect to {address.netloc}: {connect_problem(error)}")


def late(address: Address, timeout_s: float | None) -> RequestTimeout:
    return RequestTimeout(f"no complete answer from {address.netloc} within {timeout_s:g} s")


def lost(address: Address, error: BaseException) -> ServerUnavailable:
    """The connection ended, or what came is no HTTP, before the reply was complete."""
    if isinstance(error, (http.client.IncompleteRead, asyncio.IncompleteReadError)):
        error = EOFError("the reply is cut off")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return lost_connection(address.netloc, reason)


def _generate(request: Request, action: str, kind: Kind) -> Exchange:
    body: dict[str, Any] = {"id": request.request_id}
    for name, value in request.inputs.items():
        if isinstance(value, bool):
            body[name] = value
            continue
        texts = [_media_text(item) if name in MEDIA else item.decode() for item in value]
        body[name] = texts if name in MEDIA else texts[0]
    headers = {"Content-Type": "application/json"}
    return Exchange("POST", _model_path(request.model, action), kind, json.dumps(body).encode(), headers)


def _media_text(item: bytes) -> str:
    """Bytes as JSON can hold them: base64, or what is base64 or a data URI already."""
    if item.isascii() and (item.startswith(b"data:") or _BASE64.fullmatch(item)):
        return item.decode()
    return base64.b64encode(item).decode()


def _model_path(model: str, action: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{action}"


def _error_text(body: bytes) -> str:
    """The text of an error reply: JSON, or one server-sent event of JSON."""
    for data in (body, *EventParser().feed(body + b"\n\n")):
        try:
            reply = json.loads(data)
        except ValueError:
            continue
        if isinstance(reply, dict) and "error" in reply:
            return str(reply["error"])
    return body[:500].decode("utf-8", "replace").strip()
