"""vLLM's statistics become one neutral record, under the names vLLM itself publishes."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import IterationStats, RequestStateStats, SchedulerStats

from minicpmo_triton.llm.metrics import VLLM_METRICS, Metric
from minicpmo_triton.llm.stats import EngineStats, merge, stat_logger, to_engine_stats


def scheduler(running: int = 1, waiting: int = 0, usage: float = 0.5) -> Any:
    stats = SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=usage,
    )
    stats.prefix_cache_stats.record(100, 64, preempted=False)
    return stats


def iteration() -> Any:
    stats = IterationStats()
    stats.num_generation_tokens = 3
    stats.prompt_token_stats.computed = 36
    stats.prompt_token_stats.cached_tokens = 64
    stats.prompt_token_stats.total = 100
    stats.num_preempted_reqs = 2
    stats.time_to_first_tokens_iter = [0.1]
    stats.inter_token_latencies_iter = [0.01, 0.02]
    stats.n_params_iter = [2]
    request = RequestStateStats(
        num_generation_tokens=5,
        arrival_time=stats.iteration_timestamp - 9,
        queued_ts=1.0,
        scheduled_ts=2.0,
        first_token_ts=4.0,
        last_token_ts=8.0,
    )
    for reason, max_tokens in ((FinishReason.STOP, 7), (FinishReason.STOP, None), (FinishReason.LENGTH, 5)):
        stats.update_from_finished_request(
            finish_reason=reason,
            request_id="x",
            num_prompt_tokens=100,
            max_tokens_param=max_tokens,
            req_stats=request,
        )
    return stats


def test_every_number_arrives() -> None:
    stats = to_engine_stats([scheduler()], scheduler(), iteration())
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (1, 1, 0.5)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 64)
    assert (stats.prompt_tokens, stats.prompt_tokens_cached, stats.generation_tokens) == (100, 64, 3)
    assert stats.preemptions == 2
    assert stats.finished == {"stop": 2, "length": 1}
    assert list(stats.iteration_tokens) == [39]
    assert list(stats.time_to_first_token) == [0.1]
    assert list(stats.inter_token_latency) == [0.01, 0.02]
    assert list(stats.request_e2e_latency) == pytest.approx([9.0] * 3)
    assert list(stats.request_queue_time) == [1.0] * 3
    assert list(stats.request_prefill_time) == [2.0] * 3
    assert list(stats.request_decode_time) == [4.0] * 3
    assert list(stats.request_inference_time) == [6.0] * 3
    assert list(stats.request_time_per_output_token) == [1.0] * 3
    assert list(stats.request_prompt_tokens) == [100] * 3
    assert list(stats.request_generation_tokens) == [5] * 3
    assert list(stats.request_params_n) == [2]
    assert list(stats.request_params_max_tokens) == [7, 5]


def test_what_vllm_leaves_out_is_left_out() -> None:
    assert to_engine_stats([], None, None) == EngineStats()
    gauges = to_engine_stats([scheduler()], scheduler(), None)
    assert (gauges.num_requests_running, gauges.prompt_tokens) == (1, 0)
    assert to_engine_stats([scheduler()], None, iteration()).num_requests_running is None


def test_gauges_of_several_engine_cores_add_up() -> None:
    other = scheduler(running=3, waiting=2, usage=0.9)
    stats = to_engine_stats([scheduler(), other], other, None)
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (4, 4, 0.9)
    assert stats.prefix_cache_queries == 100  # only what this iteration adds


def test_merging_keeps_the_last_gauges_and_adds_the_rest() -> None:
    first = to_engine_stats([scheduler(running=9)], scheduler(), iteration())
    second = to_engine_stats([scheduler(running=2)], scheduler(), iteration())
    blind = to_engine_stats([], None, iteration())
    merged = merge([first, second, blind])
    assert merged.num_requests_running == 2
    assert merged.generation_tokens == 9
    assert merged.prefix_cache_hits == 128
    assert merged.finished == {"stop": 6, "length": 3}
    assert list(merged.inter_token_latency) == [0.01, 0.02] * 3
    assert merge([first]) is first
    assert merge([]).num_requests_running is None


def test_the_logger_takes_what_vllm_calls_it_with_and_survives_its_callback() -> None:
    seen: list[EngineStats] = []
    logger = stat_logger(seen.append)(vllm_config=None, engine_indexes=[0, 1])
    logger.log_engine_initialized()
    logger.record(scheduler(running=1), iteration(), mm_cache_stats=None, engine_idx=0)
    logger.record(scheduler(running=2), None, mm_cache_stats=None, engine_idx=1)
    logger.log()
    logger.record_sleep_state(0, 0)
    assert [stats.num_requests_running for stats in seen] == [1, 3]
    calls: list[EngineStats] = []

    def broken(stats: EngineStats) -> None:
        calls.append(stats)
        raise RuntimeError("the metrics endpoint is gone")

    logger = stat_logger(broken)(vllm_config=None)
    logger.record(scheduler(), None)
    logger.record(scheduler(), None)
    assert len(calls) == 1


def test_vllm_adds_no_prometheus_logger_beside_ours() -> None:
    assert issubclass(stat_logger(lambda stats: None), loggers.PrometheusStatLogger)
    assert "isinstance(global_stat_logger, PrometheusStatLogger)" in inspect.getsource(
        loggers.StatLoggerManager
    )


@pytest.mark.parametrize("metric", VLLM_METRICS, ids=lambda metric: metric.name)
def test_names_and_descriptions_are_vllms(metric: Metric) -> None:
    source = inspect.getsource(loggers.PrometheusStatLogger)
    name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    cls = f"self._{metric.kind}_cls"
    declared = re.search(rf'{re.escape(cls)}\(\s*name="{name}",\s*documentation=\(?\s*"([^"]*)"', source)
    assert declared, f"{cls} has no {name}"
    assert metric.description == declared.group(1)
    assert metric.field in {spec.name for spec in fields(EngineStats)}


def test_every_attribute_is_published_once() -> None:
    assert sorted(metric.field for metric in VLLM_METRICS) == sorted(
        spec.name for spec in fields(EngineStats)
    )
    assert len({metric.name for metric in VLLM_METRICS}) == len(VLLM_METRICS)


FAMILIES = {
    "vllm:iteration_tokens_total": "iteration_tokens",
    "vllm:time_to_first_token_seconds": "time_to_first_token",
    "vllm:inter_token_latency_seconds": "inter_token_latency",
    "vllm:request_time_per_output_token_seconds": "inter_token_latency",
    "vllm:request_params_n": "request_params_n",
    "vllm:request_prompt_tokens": "request_tokens",
    "vllm:request_generation_tokens": "request_tokens",
    "vllm:request_params_max_tokens": "request_tokens",
}


@pytest.mark.parametrize("max_model_len", [9, 10, 2048, 40960])
def test_buckets_are_vllms(max_model_len: int) -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets")  # 0.26 states them in the logger itself
    for metric in VLLM_METRICS:
        if metric.kind != "histogram":
            assert metric.buckets(max_model_len) == ()
            continue
        family = FAMILIES.get(metric.name, "request_latency")
        expected = buckets.histogram_buckets(family, max_model_len=max_model_len)
        assert list(metric.buckets(max_model_len)) == expected
