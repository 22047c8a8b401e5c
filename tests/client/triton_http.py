"""An HTTP server that answers as Triton 2.51's HTTP front end does: what was seen there, byte for byte.

A question ``COMMAND ARGUMENT`` says what to answer. ``generate_stream`` sends server-sent events in a
chunked body, ends it without an event for an empty final response, answers 400 to any error that comes
first and reports later ones in an event; ``generate`` and ``infer`` as noted there.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

HEADER_LENGTH = "Inference-Header-Content-Length"
METRICS = """\
# HELP minicpmo_encoder_graph_hits_total Encoder calls answered by replaying a graph
# TYPE minicpmo_encoder_graph_hits_total counter
minicpmo_encoder_graph_hits_total{device="cuda:0",instance="vision_encoder_0",model="vision_encoder"} 30
"""


class TritonHttp(ThreadingHTTPServer):
    """Remembers requests (path, headers, decoded inputs), aborted ids, and chats whose reader has left."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.left: list[str] = []
        self.metrics = METRICS


@contextmanager
def serving() -> Iterator[TritonHttp]:
    with TritonHttp() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TritonHttp

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/metrics"):
            self._whole(200, "text/plain; charset=utf-8", self.server.metrics.encode())
        elif self.path == "/v2/models/minicpmo/ready":
            self._whole(200, "text/plain", b"")
        else:
            self._whole(400, "text/plain", b'{"error":"Model version not ready"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        *_, model, action = self.path.split("/")
        inputs = self._infer_inputs(body) if action == "infer" else json.loads(body)
        self.server.requests.append((self.path, dict(self.headers), inputs))
        if model not in ("minicpmo", "minicpmo_unary", "llm", "encode"):
            text = f"Request for unknown model: '{model}' is not found"
            self._whole(404, "application/json", json.dumps({"error": text}).encode())
        elif action == "infer":
            self._infer(model, inputs)
        elif "cancel_request_id" in inputs:
            self.server.aborted.append(inputs["cancel_request_id"])
            self._begin(200, "text/event-stream; charset=utf-8")
            self._end()
        elif action == "generate":
            self._generate(model, inputs)
        else:
            self._stream(model, inputs)

    def _stream(self, model: str, inputs: dict[str, Any]) -> None:
        command, argument = question(inputs)
        event_stream = "text/event-stream; charset=utf-8"
        if command == "fail":  # whatever the error's code
            self._begin(400, event_stream)
            self._event({"error": f"in ensemble 'minicpmo', {argument}"})
            return self._end()
        if command == "silent":
            time.sleep(3)
        self._begin(200, event_stream)
        for index in range(int(argument)):
            if not self._event(answer(model, inputs["id"], f"{inputs['id']}:{index} ")):
                self.server.left.append(inputs["id"])
                return None
            if command == "slow":
                time.sleep(0.05)
            if command == "cut":
                self.close_connection = True
                return None
        if command == "midway":
            self._event({"error": "sampling_parameters: broken on purpose"})
        return self._end()

    def _generate(self, model: str, inputs: dict[str, Any]) -> None:
        command, argument = question(inputs)
        if command == "fail":
            reply, status = {"error": argument}, 400
        elif command == "twice":  # status 200 for what it says is an error
            reply, status = {"error": "generate expects model to produce exactly 1 response"}, 200
        else:
            reply, status = answer(model, inputs["id"], f"{argument} as JSON"), 200
        self._begin(status, "application/json")
        self._chunk(json.dumps(reply).encode())
        self._end()

    def _infer(self, model: str, inputs: dict[str, Any]) -> None:
        if model == "encode":
            rows = np.arange(128, dtype=np.float32).reshape(64, 2)
            bf16 = (rows.view(np.uint32) >> 16).astype("<u2").tobytes()
            if inputs.get("image") == [b"bad"]:
                return self._whole(400, "text/plain", b'{"error":"image[0]: not an image"}')
            outputs = []
            for kind in ("image", "audio"):
                num_rows, raw = (64, bf16) if kind in inputs else (0, b"")
                outputs.append((f"{kind}_embeds", "BF16", [num_rows, 2], raw))
            return self._binary(outputs)
        command, argument = question({"messages": inputs["messages"][0].decode()})
        if command == "fail":
            status, _, text = argument.partition(" ")
            return self._whole(int(status), "text/plain", json.dumps({"error": text}).encode())
        raw = argument.encode()
        return self._binary(
            [
                ("text_output", "BYTES", [1], struct.pack("<I", len(raw)) + raw),
                ("finish_reason", "BYTES", [1], struct.pack("<I", 4) + b"stop"),
                ("cumulative_logprob", "FP32", [0], b""),
                ("num_output_tokens", "UINT32", [1], struct.pack("<I", 3)),
            ]
        )

    def _binary(self, outputs: list[tuple[str, str, list[int], bytes]]) -> None:
        described = [
            {"name": name, "datatype": dtype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
            for name, dtype, shape, raw in outputs
        ]
        header = json.dumps({"model_name": "m", "model_version": "1", "outputs": described}).encode()
        body = header + b"".join(raw for *_, raw in outputs)
        self._whole(200, "application/octet-stream", body, {HEADER_LENGTH: str(len(header))})

    def _infer_inputs(self, body: bytes) -> dict[str, Any]:
        at = int(self.headers[HEADER_LENGTH])
        request = json.loads(body[:at])
        inputs: dict[str, Any] = {"id": request["id"]}
        assert request["parameters"] == {"binary_data_output": True}
        for tensor in request["inputs"]:
            assert tensor["datatype"] == "BYTES"
            end, items = at + tensor["parameters"]["binary_data_size"], []
            while at < end:
                (length,) = struct.unpack_from("<I", body, at)
                items.append(body[at + 4 : at + 4 + length])
                at += 4 + length
            assert tensor["shape"] == [len(items)]
            inputs[tensor["name"]] = items
        assert at == len(body)
        return inputs

    def _whole(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, reply: dict[str, Any]) -> bool:
        return self._chunk(b"data: " + json.dumps(reply, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> bool:
        try:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        except OSError:
            return False
        return True

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


def question(inputs: dict[str, Any]) -> tuple[str, str]:
    content = json.loads(inputs["messages"])[-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    command, _, argument = text.partition(" ")
    return command, argument


def answer(model: str, request_id: str, text: str) -> dict[str, Any]:
    """Scalars for tensors of one element, a list otherwise, as ``generate`` writes them."""
    return {
        "cumulative_logprob": [],
        "finish_reason": "",
        "id": request_id,
        "logprobs": "null",
        "model_name": model,
        "model_version": "1",
        "num_input_tokens": 7,
        "num_output_tokens": 1,
        "text_output": text,
    }
