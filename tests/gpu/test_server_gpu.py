"""The encoders' graphs through a real tritonserver: the counters it shows match the traffic it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc

from minicpmo_triton.launcher import TritonServer
from tests.scrape import settled, total

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = 2e-2  # bfloat16, where graph and eager pick other kernels
GRAPH = "minicpmo_encoder_graph"
#: Slices, rows and columns of patches; every request is one call of the encoder.
VISION_SHAPES = ((1, 32, 32), (2, 32, 32), (1, 30, 34), (4, 26, 36), (1, 20, 50))

Call = tuple[str, list[triton_grpc.InferInput]]


def encoder_inputs(**arrays: np.ndarray) -> list[triton_grpc.InferInput]:
    inputs = []
    for name, array in arrays.items():
        kind = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}[array.dtype.name]
        tensor = triton_grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def slices(num_slices: int, rows: int, columns: int, seed: int = 0, model: str = "vision_encoder") -> Call:
    random = np.random.default_rng(seed)
    patches = random.integers(0, 256, (num_slices * rows * columns, 588), dtype=np.uint8)
    return model, encoder_inputs(
        patches=patches, grid_sizes=np.array([[rows, columns]] * num_slices, np.int32)
    )


def clip(num_frames: int, seed: int = 0) -> Call:
    mel = np.random.default_rng(seed).standard_normal((num_frames, 80)).astype(np.float32)
    return "audio_encoder", encoder_inputs(mel=mel, mel_lengths=np.array([num_frames], np.int32))


def send(raw: triton_grpc.InferenceServerClient, call: Call) -> np.ndarray:
    model, inputs = call
    result = raw.infer(model, inputs)
    [output] = result.get_response().outputs
    rows: np.ndarray = result.as_numpy(output.name)
    return rows.astype(np.float32)


def difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.fixture(scope="module")
def server(serve: Callable[..., TritonServer]) -> TritonServer:
    return serve(num_instances=1)


@pytest.fixture
def raw(server: TritonServer) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


def counted(server: TritonServer, model: str) -> dict[str, float]:
    samples = settled(server.metrics_url, "minicpmo_encoder")
    misses = {
        reason: total(samples, f"{GRAPH}_misses_total", model=model, reason=reason)
        for reason in ("ineligible", "capacity", "warmup", "memory")
    }
    return {
        **misses,
        "hits": total(samples, f"{GRAPH}_hits_total", model=model),
        "graphs": total(samples, f"{GRAPH}s", model=model),
        "failures": total(samples, f"{GRAPH}_capture_failures", model=model),
        "captures": total(samples, f"{GRAPH}_captures_seconds_count", model=model),
        "items": total(samples, "minicpmo_encoder_items_total", model=model),
        "pool": total(samples, f"{GRAPH}_pool_bytes", model=model),
    }


def test_counters_match_sequential_traffic(
    server: TritonServer, raw: triton_grpc.InferenceServerClient
) -> None:
    """Five shapes, three calls each, with room for four graphs: the rules give every counter."""
    traffic = {
        "vision_encoder": [slices(n, r, c) for n, r, c in VISION_SHAPES],
        "audio_encoder": [clip(num_frames) for num_frames in (100, 500, 3000, 143, 200)],
    }
    for model, calls in traffic.items():
        first = [send(raw, call) for call in calls]
        for _ in range(2):
            worst = max(difference(send(raw, call), want) for call, want in zip(calls, first, strict=True))
            assert worst <= TOLERANCE
        items = 3 * (9 if model == "vision_encoder" else 5)
        got = counted(server, model)
        print(f"\n{model}: replay to eager {worst:.2e}; {got}")
        assert got.pop("pool") > 0
        assert got == {
            "ineligible": 0,
            "warmup": 5,  # the fifth shape warms up before the first graph is captured
            "capacity": 2,
            "memory": 0,
            "hits": 8,
            "graphs": 4,
            "captures": 4,
            "failures": 0,
            "items": items,
        }


def test_failed_capture_latches_and_the_others_answer(
    server: TritonServer, raw: triton_grpc.InferenceServerClient
) -> None:
    send(raw, slices(1, 32, 32, model="broken"))  # eager
    with pytest.raises(triton_grpc.InferenceServerException, match="capturing a CUDA graph failed") as error:
        send(raw, slices(1, 32, 32, model="broken"))
    print(f"\nthe request that captured: {error.value.message()}")
    for _ in range(2):
        with pytest.raises(triton_grpc.InferenceServerException, match="encoder_cuda_graph") as error:
            send(raw, slices(1, 32, 32, model="broken"))
        assert "UNAVAILABLE" in error.value.status()
    assert counted(server, "broken")["failures"] == 1
    want = send(raw, slices(1, 32, 32))
    assert np.array_equal(send(raw, slices(1, 32, 32)), want)
    assert counted(server, "vision_encoder")["failures"] == 0


def test_late_captures_under_concurrent_calls_of_two_instances(serve: Callable[..., TritonServer]) -> None:
    server = serve(num_instances=2)
    calls = [slices(1, 32, 32), clip(100), slices(2, 32, 32), clip(500), slices(1, 30, 34), clip(3000)]
    with triton_grpc.InferenceServerClient(server.grpc_url) as raw:
        want = [send(raw, call) for call in calls]
        sent = 600
        # Later shapes join while earlier ones replay: call i uses the first 1 + i // 60 shapes.
        plan = [i % min(len(calls), 1 + i // 60) for i in range(sent)]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda which: send(raw, calls[which]), plan))
    worst = max(difference(got, want[which]) for which, got in zip(plan, results, strict=True))
    got = {model: counted(server, model) for model in ("vision_encoder", "audio_encoder")}
    print(f"\n8 clients, 2 instances each: largest difference to the first answer {worst:.2e}; {got}")
    assert worst <= TOLERANCE
    num_slices = {0: 1, 2: 2, 4: 1}
    expected = sum(num_slices.get(which, 0) for which in [*plan, *range(len(calls))])
    assert got["vision_encoder"]["items"] == expected
    assert got["audio_encoder"]["items"] == sum(which % 2 for which in [*plan, *range(len(calls))])
    for counters in got.values():
        assert counters["failures"] == 0
        assert counters["ineligible"] == counters["memory"] == 0
        assert counters["hits"] > 100
    samples = settled(server.metrics_url, "minicpmo_encoder")
    instances = [
        s.labels["instance"] for s in samples if s.name == f"{GRAPH}s" and s.labels["model"] != "broken"
    ]
    assert len(instances) == len(set(instances)) == 4


def test_memory_floor_holds_on_the_server(serve: Callable[..., TritonServer]) -> None:
    floor = torch.cuda.get_device_properties(0).total_memory
    server = serve(num_instances=1, encoder_cuda_graph_min_free_bytes=str(floor))
    with triton_grpc.InferenceServerClient(server.grpc_url) as raw:
        answers = [send(raw, clip(100)) for _ in range(4)]
    assert all(np.array_equal(a, b) for a, b in pairwise(answers))
    got = counted(server, "audio_encoder")
    assert (got["warmup"], got["memory"], got["graphs"], got["hits"]) == (1, 3, 0, 0)
