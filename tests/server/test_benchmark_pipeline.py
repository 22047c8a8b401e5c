"""The pipeline benchmark measures a real server: its figures are there and fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
from benchmarks.load import Answered, LoadGenerator
from benchmarks.pipeline import Plan, measure_running
from benchmarks.requests import KINDS, raw_request
from benchmarks.serving import derived_repository
from benchmarks.single_process import OrdinaryEncoders
from benchmarks.steps import STEPS, Span, breakdown, split

from minicpmo_triton.launcher import TritonServer

PLAN = Plan(("text", "image-448+audio-5s"), (1, 3), requests=2, rounds=2, num_tokens=4)


def test_a_running_server_is_measured(server: TritonServer) -> None:
    with (
        triton_grpc.InferenceServerClient(server.grpc_url) as triton,
        LoadGenerator(server.grpc_url, num_processes=2) as clients,
    ):
        result, _ = measure_running(server.metrics_url, triton, clients, PLAN, trace=False)
        answers = clients.run("text", 2, 2, num_tokens=4, first_index=10_000).answered
    assert [answer.num_tokens for answer in answers] == [4] * 4
    assert list(result["kinds"]) == list(PLAN.kinds)
    for kind, of in result["kinds"].items():
        assert {c: figures["requests"] for c, figures in of["clients"].items()} == {"1": 2, "3": 6}
        for figures in of["clients"].values():
            assert 0 < figures["first_token_ms"] < 60_000
            assert figures["first_token_p90_ms"] >= figures["first_token_ms"]
            assert figures["requests_per_s"] > 0
        assert of["triton"]["minicpmo"]["requests"] == of["triton"]["llm"]["requests"] == 8
        # With text alone no encoder runs; a picture and a recording are one call each, or share one.
        calls = of["graph_counters"]["misses"] + of["graph_counters"]["hits"]
        assert calls == 0 if kind == "text" else 2 <= calls <= 16


def test_a_failed_request_fails_the_measurement(server: TritonServer) -> None:
    with (
        LoadGenerator(server.grpc_url, num_processes=1) as clients,
        pytest.raises(RuntimeError, match="max_tokens"),
    ):
        clients.run("text", 1, 1, num_tokens=0, first_index=0)


def test_steps_sum_to_the_time_to_first_token() -> None:
    ms = 1_000_000
    spans = {
        "minicpmo": Span(1001 * ms, 0),
        "preprocess": Span(1001 * ms, 1002 * ms),
        "vision_encoder": Span(1008 * ms, 1009 * ms),
        "audio_encoder": Span(1007 * ms, 1008 * ms),
        "llm": Span(1020 * ms, 1023 * ms),
    }
    answered = Answered(sent=1.0, first=1.04, last=1.1, num_tokens=4)
    steps = split(answered, spans)
    assert steps == pytest.approx(
        {"arrive": 1, "preprocess": 6, "encode": 13, "hand-over": 3, "engine": 17}, abs=1e-3
    )
    assert sum(steps.values()) == pytest.approx(answered.first_token_ms)
    assert breakdown([answered], [spans]) == pytest.approx(steps, abs=1e-3)
    assert list(steps) == list(STEPS)
    later = Answered(sent=2.0, first=2.04, last=2.1, num_tokens=4)
    assert breakdown([later], [spans]) is None


def test_parameters_reach_the_models_that_have_them(tmp_path: Path) -> None:
    repository = derived_repository(tmp_path / "models", {"encoder_cuda_graph_max_graphs": "24"})
    changed = {
        config.parent.name
        for config in repository.glob("*/config.pbtxt")
        if '"encoder_cuda_graph_max_graphs" value: { string_value: "24"' in config.read_text()
    }
    assert changed == {"vision_encoder", "audio_encoder"}


def test_requests_differ_by_their_number_only() -> None:
    for kind in KINDS.values():
        assert raw_request(kind, 7) == raw_request(kind, 7)
        assert raw_request(kind, 7) != raw_request(kind, 8)


def test_ordinary_encoders_agree_with_the_server(server: TritonServer, tiny_checkpoint: Path) -> None:
    """Both sides of the comparison answer the same question."""
    import numpy as np
    import torch

    from minicpmo_triton.checkpoint import Checkpoint
    from minicpmo_triton.config import PreprocessParameters
    from minicpmo_triton.preprocess import Preprocessor

    raw = raw_request(KINDS["image-448+audio-5s"], 0)
    preprocessor = Preprocessor(tiny_checkpoint, PreprocessParameters())
    try:
        request = preprocessor.process(raw)
    finally:
        preprocessor.close()
    encode = OrdinaryEncoders(Checkpoint(tiny_checkpoint), torch.float32, torch.device("cpu"))
    inputs = []
    for name, items in (("messages", [raw.messages]), ("image", raw.images), ("audio", raw.audios)):
        tensor = triton_grpc.InferInput(name, [len(items)], "BYTES")
        tensor.set_data_from_numpy(np.array(items, dtype=np.object_))
        inputs.append(tensor)
    with triton_grpc.InferenceServerClient(server.grpc_url) as triton:
        served = triton.infer("encode", inputs)
    for name, rows in zip(("image_embeds", "audio_embeds"), encode(request), strict=True):
        want = served.as_numpy(name)
        assert rows.shape == want.shape
        assert np.abs(rows.numpy() - want).max() <= 1e-3 * np.abs(want).max()
