"""vLLM's own metrics on Triton's endpoint: names, labels, and what a request adds to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.llm.metrics import VLLM_METRICS
from tests.scrape import scrape

from .counted import Counted, counted
from .raw import Value, stream_whole

NUM_OUTPUT_TOKENS = 7
SAMPLING = {"temperature": 0, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}
LABELS = {"model": "llm", "version": "1"}


def ask(server: TritonServer, model: str = "minicpmo", **values: Value) -> int:
    """Answered in full; the number of input tokens."""
    values = {"text_input": "Count to ten.", "sampling_parameters": json.dumps(SAMPLING), **values}
    if model == "llm":
        values["return_num_input_tokens"] = True
    answer = stream_whole(server.grpc_url, model, values)
    assert answer.errors == []
    return int(answer.responses[0]["num_input_tokens"][0])


def test_every_family_is_there_under_vllms_name_with_model_and_version(server: TritonServer) -> None:
    with counted(server, 1) as seen:
        ask(server)
    found = {sample.name: sample.labels for sample in seen.after}
    for metric in VLLM_METRICS:
        if metric.field in ("inter_token_latency", "iteration_tokens"):
            continue  # an observation a token is left out on purpose (docs/metrics.md)
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert name in found, name
        assert LABELS.items() <= found[name].items(), name
        assert set(found[name]) <= {*LABELS, metric.label}


def test_counters_move_by_the_tokens_of_a_request(server: TritonServer, media_dir: Path) -> None:
    picture = (media_dir / "coins.png").read_bytes()
    with counted(server, 3) as seen:
        num_input_tokens = ask(server) + ask(server, stream=True) + ask(server, "llm", image=[picture])
    assert seen.change("vllm:prompt_tokens_total", **LABELS) == num_input_tokens
    assert seen.change("vllm:generation_tokens_total", **LABELS) == 3 * NUM_OUTPUT_TOKENS
    assert seen.change("vllm:request_success_total", finished_reason="length", **LABELS) == 3
    assert seen.change("vllm:request_prompt_tokens_sum", **LABELS) == num_input_tokens
    assert seen.change("vllm:request_generation_tokens_sum", **LABELS) == 3 * NUM_OUTPUT_TOKENS


def test_histograms_of_latency_count_requests(server: TritonServer) -> None:
    num_requests = 2
    with counted(server, num_requests) as seen:
        for _ in range(num_requests):
            ask(server)
    per_request = (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_time_per_output_token_seconds",
    )
    for name in per_request:
        assert seen.change(f"{name}_count", **LABELS) == num_requests, name
        assert seen.change(f"{name}_sum", **LABELS) > 0, name
        assert seen.change(f"{name}_bucket", le="+Inf", **LABELS) == num_requests, name
    first, whole = (seen.change(f"{per_request[i]}_sum") for i in (0, 1))
    assert first < whole


@pytest.mark.parametrize(
    ("sampling", "reason"), [({"stop_token_ids": list(range(512))}, "stop"), ({}, "length")]
)
def test_requests_count_by_how_they_ended(
    sampling: dict[str, object], reason: str, server: TritonServer
) -> None:
    seen: Counted
    with counted(server, 1) as seen:
        ask(server, sampling_parameters=json.dumps({**SAMPLING, **sampling}))
    assert seen.change("vllm:request_success_total", finished_reason=reason, **LABELS) == 1


def test_nothing_runs_or_waits_once_all_is_answered(server: TritonServer) -> None:
    with counted(server, 1):
        ask(server)
    values = {sample.name: sample.value for sample in scrape(server.metrics_url)}
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:num_requests_waiting"] == 0
    assert 0 <= values["vllm:kv_cache_usage_perc"] <= 1
