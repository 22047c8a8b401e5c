"""vLLM's metrics as its own server publishes them: names, kinds, descriptions and buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_ITERATION = tuple(float(2**power) for power in (0, *range(3, 15)))
_SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Metric:
    """A family on the metrics endpoint and the attribute of ``stats.EngineStats`` that feeds it."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    description: str
    field: str
    #: A further label: the attribute is then a mapping of its value to what is added.
    label: str | None = None
    #: Upper bounds of a histogram; empty where they depend on the context (:meth:`buckets`).
    fixed_buckets: tuple[float, ...] = ()

    def buckets(self, max_model_len: int) -> tuple[float, ...]:
        """Upper bounds of a histogram, those of vLLM: token counts go by 1, 2, 5 up to the context."""
        if self.kind != "histogram" or self.fixed_buckets:
            return self.fixed_buckets
        bounds = (m * 10**power for power in range(len(str(max_model_len))) for m in (1, 2, 5))
        return tuple(float(bound) for bound in bounds if bound <= max_model_len)


#: Names and descriptions are those on the metrics endpoint of vLLM's own server, 0.26 and 0.32.
VLLM_METRICS = (
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        "num_requests_running",
    ),
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        "num_requests_waiting",
    ),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        "kv_cache_usage",
    ),
    Metric(
        "vllm:prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        "prompt_tokens",
    ),
    Metric(
        "vllm:prompt_tokens_cached_total",
        "counter",
        "Number of cached prompt tokens (local + external).",
        "prompt_tokens_cached",
    ),
    Metric(
        "vllm:generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        "generation_tokens",
    ),
    Metric(
        "vllm:num_preemptions_total",
        "counter",
        "Cumulative number of preemption from the engine.",
        "preemptions",
    ),
    Metric(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        "prefix_cache_queries",
    ),
    Metric(
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        "prefix_cache_hits",
    ),
    Metric(
        "vllm:request_success_total",
        "counter",
        "Count of successfully processed requests.",
        "finished",
        label="finished_reason",
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "Histogram of number of tokens per engine_step.",
        "iteration_tokens",
        fixed_buckets=_ITERATION,
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Histogram of time to first token in seconds.",
        "time_to_first_token",
        fixed_buckets=_FIRST_TOKEN,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Histogram of inter-token latency in seconds.",
        "inter_token_latency",
        fixed_buckets=_PER_TOKEN,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Histogram of e2e request latency in seconds.",
        "request_e2e_latency",
        fixed_buckets=_LATENCY,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Histogram of time spent in WAITING phase for request.",
        "request_queue_time",
        fixed_buckets=_LATENCY,
    ),
    Metric(
        "vllm:request_inference_time_seconds",
        "histogram",
        "Histogram of time spent in RUNNING phase for request.",
        "request_inference_time",
        fixed_buckets=_LATENCY,
    ),
    Metric(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "Histogram of time spent in PREFILL phase for request.",
        "request_prefill_time",
        fixed_buckets=_LATENCY,
    ),
    Metric(
        "vllm:request_decode_time_seconds",
        "histogram",
        "Histogram of time spent in DECODE phase for request.",
        "request_decode_time",
        fixed_buckets=_LATENCY,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        "request_time_per_output_token",
        fixed_buckets=_PER_TOKEN,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "Number of prefill tokens processed.",
        "request_prompt_tokens",
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "Number of generation tokens processed.",
        "request_generation_tokens",
    ),
    Metric(
        "vllm:request_params_n",
        "histogram",
        "Histogram of the n request parameter.",
        "request_params_n",
        fixed_buckets=_SEQUENCES,
    ),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "Histogram of the max_tokens request parameter.",
        "request_params_max_tokens",
    ),
)
