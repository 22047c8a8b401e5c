"""Requests with tritonclient alone, as somebody without our client sends them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc

_DTYPES = {"bool": "BOOL", "uint8": "UINT8", "int32": "INT32", "float32": "FP32"}

Value = str | bytes | bool | list[bytes] | np.ndarray


def grpc_inputs(values: Mapping[str, Value]) -> list[triton_grpc.InferInput]:
    """Inputs by name: text and bytes become BYTES, a bool BOOL[1], arrays what they are."""
    return [_fill(triton_grpc.InferInput, name, value) for name, value in values.items()]


def _fill(kind: Any, name: str, value: Value) -> Any:
    if isinstance(value, bool):
        value = np.array([value])
    elif isinstance(value, (str, bytes)):
        value = [value.encode() if isinstance(value, str) else value]
    if isinstance(value, list):
        tensor = kind(name, [len(value)], "BYTES")
        tensor.set_data_from_numpy(np.array(value, dtype=np.object_))
        return tensor
    tensor = kind(name, list(value.shape), _DTYPES[value.dtype.name])
    tensor.set_data_from_numpy(value)
    return tensor


def http_inputs(values: Mapping[str, Value]) -> list[Any]:
    import tritonclient.http as triton_http

    return [_fill(triton_http.InferInput, name, value) for name, value in values.items()]


@dataclass
class Answer:
    """What one streamed request got, as it comes in."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_final: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    arrived: queue.Queue[None] = field(default_factory=queue.Queue)

    @property
    def text(self) -> str:
        return b"".join(r["text_output"][0] for r in self.responses).decode()

    def receive(self, result: Any, error: Any) -> None:
        if error is not None:  # an error ends the request and carries no parameters
            self.errors.append(f"{error.status() or ''} {error.message()}")
            self.num_final += 1
            self.ended.set()
        else:
            response = result.get_response()
            if response.outputs:
                self.responses.append({o.name: result.as_numpy(o.name) for o in response.outputs})
            if response.parameters["triton_final_response"].bool_param:
                self.num_final += 1
                self.ended.set()
        self.arrived.put(None)


@contextmanager
def streaming(
    url: str, model: str, values: Mapping[str, Value], request_id: str = "", headers: Any = None
) -> Iterator[tuple[Answer, triton_grpc.InferenceServerClient]]:
    """Send one request and yield what it gets; the stream is closed at the end, cancelling what is left."""
    answer = Answer()
    with triton_grpc.InferenceServerClient(url) as client:
        client.start_stream(answer.receive, headers=headers)
        client.async_stream_infer(
            model, grpc_inputs(values), request_id=request_id, enable_empty_final_response=True
        )
        try:
            yield answer, client
        finally:
            client.stop_stream(cancel_requests=not answer.ended.is_set())


def stream_whole(url: str, model: str, values: Mapping[str, Value], request_id: str = "") -> Answer:
    """One request, and everything it gets."""
    with streaming(url, model, values, request_id) as (answer, _):
        assert answer.ended.wait(120), "no final response"
    return answer
