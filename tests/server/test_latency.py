"""What the pipeline adds to a text-only request, in one run on one server."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import tritonclient.grpc as triton_grpc

from minicpmo_triton.launcher import TritonServer

ROUNDS = 30
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 1, "ignore_eos": True}).encode()


def bytes_input(name: str, value: bytes) -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensor


def array_input(name: str, array: np.ndarray) -> triton_grpc.InferInput:
    kind = {"int32": "INT32", "float32": "FP32"}[array.dtype.name]
    tensor = triton_grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def timed(url: str, model: str, inputs: list[triton_grpc.InferInput]) -> list[float]:
    """Milliseconds from request to response, one request after another on one stream."""
    import queue

    answers: queue.Queue[object] = queue.Queue()
    times = []
    with triton_grpc.InferenceServerClient(url) as raw:
        raw.start_stream(lambda result, error: answers.put(error or result))
        for _ in range(ROUNDS):
            started = time.perf_counter()
            raw.async_stream_infer(model, inputs)
            answer = answers.get(timeout=60)
            times.append(1000 * (time.perf_counter() - started))
            assert isinstance(answer, triton_grpc.InferResult), answer
        raw.stop_stream()
    return times


def test_text_only_request_through_the_encoders(
    server: TritonServer, report_line: Callable[[str], None]
) -> None:
    text = bytes_input("text_input", b"Hello! Who are you?")
    sampling = bytes_input("sampling_parameters", SAMPLING)
    with triton_grpc.InferenceServerClient(server.grpc_url) as raw:
        encoded = raw.infer("encode", [text])
    names = ("input_ids", "image_positions", "audio_positions", "image_embeds", "audio_embeds")
    direct = [array_input(name, encoded.as_numpy(name)) for name in names]
    assert encoded.as_numpy("image_embeds").shape == (0, 128)

    for _ in range(2):  # the first round warms up
        alone = timed(server.grpc_url, "llm", [*direct, sampling])
        whole = timed(server.grpc_url, "minicpmo", [text, sampling])
    added = statistics.median(whole) - statistics.median(alone)
    report_line(
        f"text only, one token: llm alone {statistics.median(alone):.1f} ms, minicpmo "
        f"{statistics.median(whole):.1f} ms, added by preprocess and both encoders {added:.1f} ms "
        f"(medians of {ROUNDS})"
    )
    assert added < 50  # a few hops between processes, not an encoder pass
