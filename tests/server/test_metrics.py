"""What the operator sees: every call of an encoder is counted on Triton's metrics endpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from minicpmo_client import Client
from minicpmo_triton.launcher import TritonServer
from tests.scrape import Sample, settled, total

GREEDY = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
GRAPH = "minicpmo_encoder_graph"


def changes(before: list[Sample], after: list[Sample], name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


def test_calls_on_the_cpu_count_as_ineligible(server: TritonServer, client: Client, media_dir: Path) -> None:
    before = settled(server.metrics_url, "minicpmo_encoder")
    # 512x512: the whole picture and two slices of equal size, so one call of one and one of two.
    client.chat("What?", images=[media_dir / "astronaut.png"], sampling=GREEDY, stream=False)
    client.chat("What?", audio=[media_dir / "front_center_16k.wav"], sampling=GREEDY, stream=False)
    after = settled(server.metrics_url, "minicpmo_encoder")
    for model, calls, items in (("vision_encoder", 2, 3), ("audio_encoder", 1, 1)):
        misses = f"{GRAPH}_misses_total"
        assert changes(before, after, misses, model=model, reason="ineligible") == calls
        assert changes(before, after, misses, model=model) == calls
        assert changes(before, after, f"{GRAPH}_hits_total", model=model) == 0
        assert changes(before, after, "minicpmo_encoder_items_total", model=model) == items
        assert changes(before, after, "minicpmo_encoder_seconds_count", model=model, path="eager") == calls
        assert changes(before, after, "minicpmo_encoder_seconds_sum", model=model, path="eager") > 0


def test_text_only_request_makes_no_encoder_call(server: TritonServer, client: Client) -> None:
    before = settled(server.metrics_url, "minicpmo_encoder")
    client.chat("Hello!", sampling=GREEDY, stream=False)
    after = settled(server.metrics_url, "minicpmo_encoder")
    for name in (f"{GRAPH}_misses_total", f"{GRAPH}_hits_total", "minicpmo_encoder_seconds_count"):
        assert changes(before, after, name) == 0
    assert changes(before, after, "minicpmo_encoder_items_total") == 0


def test_every_family_is_there_from_the_start_with_its_labels(server: TritonServer) -> None:
    samples = settled(server.metrics_url, "minicpmo_encoder")
    for model in ("vision_encoder", "audio_encoder"):
        for name in (
            f"{GRAPH}_hits_total",
            f"{GRAPH}s",
            f"{GRAPH}_capture_failures",
            f"{GRAPH}_static_bytes",
            f"{GRAPH}_pool_bytes",
            f"{GRAPH}_captures_seconds_count",
            "minicpmo_encoder_items_total",
        ):
            [sample] = [s for s in samples if s.name == name and s.labels["model"] == model]
            assert sample.labels["instance"].startswith(model)
            assert sample.labels["device"] == "cpu"
        reasons = {
            s.labels["reason"]
            for s in samples
            if s.name == f"{GRAPH}_misses_total" and s.labels["model"] == model
        }
        assert reasons == {"ineligible", "capacity", "warmup", "memory"}


@pytest.mark.parametrize(
    ("sizes", "named"),
    [([[2, 3]], "grid_sizes"), ([[0, 4]], "grid_sizes"), ([[-2, -2]], "grid_sizes")],
)
def test_encoder_used_directly_names_the_wrong_tensor(
    sizes: list[list[int]], named: str, server: TritonServer
) -> None:
    inputs = []
    for name, kind, array in (
        ("patches", "UINT8", np.zeros((4, 588), np.uint8)),
        ("grid_sizes", "INT32", np.array(sizes, np.int32)),
    ):
        tensor = triton_grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with (
        triton_grpc.InferenceServerClient(server.grpc_url) as raw,
        pytest.raises(triton_grpc.InferenceServerException, match=named) as refused,
    ):
        raw.infer("vision_encoder", inputs)
    assert "INVALID_ARGUMENT" in refused.value.status()
