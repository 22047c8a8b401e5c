"""vLLM's statistics in the project's own terms, one record per iteration of the engine.

vLLM's record classes are not stable from version to version; this module reads them, and
``metrics.VLLM_METRICS`` says under which name, kind and buckets vLLM itself publishes each number.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """What an iteration of the engine leaves behind: gauges as they are, all else what it adds.

    Times are in seconds, lengths in tokens. A gauge is None where the iteration did not tell.
    """

    # Gauges.
    num_requests_running: int | None = None
    num_requests_waiting: int | None = None
    kv_cache_usage: float | None = None  # 0 to 1
    # Added to counters.
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    finished: Mapping[str, int] = field(default_factory=dict)  # "stop", "length", "abort", … -> requests
    # Observations of histograms: of the iteration, then of the requests that got a token or finished.
    iteration_tokens: Sequence[int] = ()
    time_to_first_token: Sequence[float] = ()
    inter_token_latency: Sequence[float] = ()
    request_e2e_latency: Sequence[float] = ()
    request_queue_time: Sequence[float] = ()
    request_inference_time: Sequence[float] = ()
    request_prefill_time: Sequence[float] = ()
    request_decode_time: Sequence[float] = ()
    request_time_per_output_token: Sequence[float] = ()
    request_prompt_tokens: Sequence[int] = ()
    request_generation_tokens: Sequence[int] = ()
    request_params_n: Sequence[int] = ()
    request_params_max_tokens: Sequence[int] = ()


OnStats = Callable[[EngineStats], None]


_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")


def merge(records: Sequence[EngineStats]) -> EngineStats:
    """One record for several in order: the last gauges, sums, all observations.

    For a publisher to which each call is dear.
    """
    if len(records) == 1:
        return records[0]
    merged: dict[str, Any] = {}
    for spec in fields(EngineStats):
        values = [getattr(record, spec.name) for record in records]
        if spec.name in _GAUGES:
            merged[spec.name] = next((value for value in reversed(values) if value is not None), None)
        elif spec.name == "finished":
            merged[spec.name] = sum(map(Counter, values), Counter())
        elif isinstance(spec.default, int):
            merged[spec.name] = sum(values)
        else:
            merged[spec.name] = [value for observations in values for value in observations]
    return EngineStats(**merged)


def to_engine_stats(schedulers: Sequence[Any], scheduler: Any | None, iteration: Any | None) -> EngineStats:
    """Read vLLM's SchedulerStats and IterationStats, either of which may be missing.

    ``schedulers`` are the latest of every engine core (more than one with data parallelism); their
    requests add up, and the fullest cache counts.
    """
    values: dict[str, Any] = {}
    if scheduler is not None:
        values = {
            "num_requests_running": sum(s.num_running_reqs for s in schedulers),
            "num_requests_waiting": sum(s.num_waiting_reqs + s.num_skipped_waiting_reqs for s in schedulers),
            "kv_cache_usage": max(s.kv_cache_usage for s in schedulers),
            "prefix_cache_queries": scheduler.prefix_cache_stats.queries,
            "prefix_cache_hits": scheduler.prefix_cache_stats.hits,
        }
    if iteration is not None:
        prompt = iteration.prompt_token_stats
        values |= {
            "prompt_tokens": prompt.total,
            "prompt_tokens_cached": prompt.cached_tokens,
            "generation_tokens": iteration.num_generation_tokens,
            "preemptions": iteration.num_preempted_reqs,
            "iteration_tokens": (prompt.computed + iteration.num_generation_tokens,),
            "time_to_first_token": iteration.time_to_first_tokens_iter,
            "inter_token_latency": iteration.inter_token_latencies_iter,
            "request_params_n": iteration.n_params_iter,
        }
        if iteration.finished_requests:
            values |= _finished(iteration.finished_requests)
    return EngineStats(**values)


def _finished(requests: Sequence[Any]) -> dict[str, Any]:
    return {
        "finished": Counter(str(request.finish_reason) for request in requests),
        "request_e2e_latency": [request.e2e_latency for request in requests],
        "request_queue_time": [request.queued_time for request in requests],
        "request_inference_time": [request.inference_time for request in requests],
        "request_prefill_time": [request.prefill_time for request in requests],
        "request_decode_time": [request.decode_time for request in requests],
        "request_time_per_output_token": [request.mean_time_per_output_token for request in requests],
        "request_prompt_tokens": [request.num_prompt_tokens for request in requests],
        "request_generation_tokens": [request.num_generation_tokens for request in requests],
        "request_params_max_tokens": [r.max_tokens_param for r in requests if r.max_tokens_param],
    }


def stat_logger(on_stats: OnStats) -> type:
    """The class that AsyncLLM takes as a stat logger; it calls ``on_stats`` on the engine's loop."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    # Of Prometheus' class because AsyncLLM otherwise adds one of those, which would count every token
    # a second time for an endpoint that nobody reads. Nothing of it is used.
    class StatLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM's classes are untyped here
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self._latest: dict[int, Any] = {}
            self._broken = False

        def record(
            self,
            scheduler_stats: Any | None,
            iteration_stats: Any | None,
            mm_cache_stats: Any | None = None,
            engine_idx: int = 0,
        ) -> None:
            if self._broken:
                return
            try:
                if scheduler_stats is not None:
                    self._latest[engine_idx] = scheduler_stats
                schedulers = tuple(self._latest.values())
                on_stats(to_engine_stats(schedulers, scheduler_stats, iteration_stats))
            except Exception:  # statistics must not cost the engine, which an exception here would end
                self._broken = True
                _logger.exception("the engine's statistics fail; no more are published")

        def log(self) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def record_admission_rejection(self, reason: str) -> None: ...

    return StatLogger
