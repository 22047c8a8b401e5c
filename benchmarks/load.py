"""Clients in processes of their own, each with a few streams, that ask one request after another.

They use tritonclient's generated stub with messages built beforehand and read only the number of tokens
from a response, so that the processor time they take, which is measured, stays small beside the server's.
"""

from __future__ import annotations

import multiprocessing
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.requests import KINDS, raw_request, sampling_json
from minicpmo_triton.request import RawRequest

REQUEST_TIMEOUT_S = 300.0
_MAX_MESSAGE = ("grpc.max_send_message_length", 2**31 - 1)


@dataclass(frozen=True)
class Answered:
    """One request; times of one clock (:func:`time.monotonic`) for all processes, in seconds."""

    sent: float
    first: float  # response with a token
    last: float
    num_tokens: int

    @property
    def first_token_ms(self) -> float:
        return 1000 * (self.first - self.sent)

    @property
    def inter_token_ms(self) -> float:
        """Mean time between tokens after the first."""
        return 1000 * (self.last - self.first) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True)
class Load:
    """What one process does: ``streams`` streams of ``per_stream`` requests of one kind."""

    kind: str
    first_index: int  # of its requests, whose media follow from their numbers
    streams: int
    per_stream: int
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """All requests of one load, and what the clients cost."""

    answered: list[Answered]
    client_cpu_s: float

    @property
    def wall_s(self) -> float:
        return max(a.last for a in self.answered) - min(a.sent for a in self.answered)

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.wall_s

    @property
    def client_cores(self) -> float:
        """Processor time of all clients over the wall time."""
        return self.client_cpu_s / self.wall_s

    def percentile(self, name: str, percent: float) -> float:
        """Of the property ``name`` of :class:`Answered`, over the requests."""
        return float(np.percentile([getattr(a, name) for a in self.answered], percent))


class LoadGenerator:
    """Client processes that live as long as this does; use it as a context manager."""

    def __init__(self, url: str, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client_process, args=(url, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, kind: str, concurrency: int, per_stream: int, num_tokens: int, first_index: int) -> Run:
        """``concurrency`` streams, spread over the processes, start together once all have their media."""
        loads, index = [], first_index
        for streams in _spread(concurrency, len(self._pipes)):
            loads.append(Load(kind, index, streams, per_stream, num_tokens))
            index += streams * per_stream
        pipes = self._pipes[: len(loads)]
        for pipe, load in zip(pipes, loads, strict=True):
            pipe.send(load)
        for pipe in pipes:
            _received(pipe)  # ready
        for pipe in pipes:
            pipe.send("go")
        results = [_received(pipe) for pipe in pipes]
        return Run([a for answered, _ in results for a in answered], sum(cpu_s for _, cpu_s in results))

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # what ends a process
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()


def _spread(count: int, places: int) -> list[int]:
    """``count`` in at most ``places`` parts as equal as can be, none of them 0."""
    return [count // places + (place < count % places) for place in range(min(count, places))]


def _received(pipe: Connection) -> Any:
    value = pipe.recv()
    if isinstance(value, Exception):
        raise value
    return value


def _client_process(url: str, pipe: Connection) -> None:
    with grpc.insecure_channel(url, options=[_MAX_MESSAGE]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while True:
            try:
                load: Load = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(_run_load(stub, load, pipe))
            except Exception as error:
                pipe.send(RuntimeError(f"a client failed: {error}"))


def _run_load(stub: Any, load: Load, pipe: Connection) -> tuple[list[Answered], float]:
    messages = [
        request_message(raw_request(KINDS[load.kind], load.first_index + i), load.num_tokens)
        for i in range(load.streams * load.per_stream)
    ]
    shares = [messages[stream :: load.streams] for stream in range(load.streams)]
    with ThreadPoolExecutor(load.streams) as pool:
        pipe.send("ready")
        pipe.recv()
        before = time.process_time()
        answered = [a for share in pool.map(lambda share: _ask_all(stub, share), shares) for a in share]
        return answered, time.process_time() - before


def _ask_all(stub: Any, messages: Sequence[Any]) -> list[Answered]:
    return [_ask(stub, message) for message in messages]


def _ask(stub: Any, message: Any) -> Answered:
    sent = time.monotonic()
    first = last = 0.0
    num_tokens = 0
    responses = stub.ModelStreamInfer(
        iter((message,)), metadata=(("triton_grpc_error", "true"),), timeout=REQUEST_TIMEOUT_S
    )
    for response in responses:
        tokens = _num_tokens(response.infer_response)
        if tokens:
            last = time.monotonic()
            first = first or last
            num_tokens += tokens
    if not num_tokens:
        raise RuntimeError("an answer without a token")
    return Answered(sent, first, last, num_tokens)


def _num_tokens(response: Any) -> int:
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == "num_output_tokens":
            return sum(struct.unpack(f"<{len(raw) // 4}I", raw))
    return 0


def request_message(raw: RawRequest, num_tokens: int) -> Any:
    """The gRPC message of one streamed request to the whole pipeline."""
    message = service_pb2.ModelInferRequest(model_name="minicpmo")
    tensors: dict[str, Sequence[bytes]] = {
        "messages": [raw.messages or b""],
        "image": raw.images,
        "audio": raw.audios,
        "sampling_parameters": [sampling_json(num_tokens)],
    }
    for name, items in tensors.items():
        if items:
            message.inputs.add(name=name, datatype="BYTES", shape=[len(items)])
            message.raw_input_contents.append(b"".join(struct.pack("<I", len(i)) + i for i in items))
    message.inputs.add(name="stream", datatype="BOOL", shape=[1])
    message.raw_input_contents.append(b"\x01")
    return message
