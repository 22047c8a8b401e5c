"""The models' own figures on Triton's metrics endpoint; docs/metrics.md says what each means.

Triton's metric objects are not for two threads at once: that ends the server (seen on 2.51). Every use
of one goes through :func:`_update`, one at a time in a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from minicpmo_triton.graphs.stats import GraphStats, Miss
from minicpmo_triton.llm.metrics import VLLM_METRICS, Metric
from minicpmo_triton.llm.stats import EngineStats, merge

PREFIX = "minicpmo_encoder"
#: Upper bounds in seconds: a replay of a second of audio takes about one millisecond.
CALL_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CAPTURE_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

_one_at_a_time = threading.Lock()


def _update(operation: Callable[[float], object], value: float) -> None:
    with _one_at_a_time:
        operation(value)


class EncoderMetrics:
    """Published totals of one model instance.

    Every family carries the labels ``model``, ``instance`` and ``device``, so that two instances of a
    model, each a process of its own, report side by side. Triton's metrics have no "set to" for
    counters: what is added is the difference to the totals published before.
    """

    def __init__(self, model: str, instance: str, device: str) -> None:
        self._labels = {"model": model, "instance": instance, "device": device}
        self._published: dict[Any, float] = {}
        self._families: list[Any] = []  # Triton deletes a family's metrics with it
        self._hits = self._metric("graph_hits_total", "Calls answered by replaying a graph", "COUNTER")
        misses = self._family("graph_misses_total", "Calls run eagerly, by reason", "COUNTER")
        self._misses = {miss: misses.Metric(labels={**self._labels, "reason": miss.value}) for miss in Miss}
        self._graphs = self._metric("graphs", "Captured graphs", "GAUGE")
        self._failures = self._metric(
            "graph_capture_failures", "1 once a capture has failed and the encoder refuses calls", "GAUGE"
        )
        self._static = self._metric("graph_static_bytes", "Static input and output buffers", "GAUGE")
        self._pool = self._metric("graph_pool_bytes", "Device memory that captures kept", "GAUGE")
        self._captures = self._metric(
            "graph_captures_seconds", "Time of a capture", "HISTOGRAM", CAPTURE_SECONDS
        )
        self._items = self._metric("items_total", "Slices or audio chunks encoded", "COUNTER")
        seconds = self._family("seconds", "Time of a call of the encoder, by path", "HISTOGRAM")
        self._seconds = {
            path: seconds.Metric(labels={**self._labels, "path": path}, buckets=list(CALL_SECONDS))
            for path in ("graph", "eager")
        }

    def _family(self, name: str, description: str, kind: str) -> Any:
        family = pb_utils.MetricFamily(
            name=f"{PREFIX}_{name}", description=description, kind=getattr(pb_utils.MetricFamily, kind)
        )
        self._families.append(family)
        return family

    def _metric(self, name: str, description: str, kind: str, buckets: tuple[float, ...] = ()) -> Any:
        family = self._family(name, description, kind)
        if buckets:
            return family.Metric(labels=self._labels, buckets=list(buckets))
        return family.Metric(labels=self._labels)

    def publish(self, stats: GraphStats, static_bytes: int, pool_bytes: int) -> None:
        """Bring counters and gauges to these totals; what has not changed costs nothing."""
        misses: Mapping[Miss, int] = {
            Miss.INELIGIBLE: stats.ineligible_misses,
            Miss.CAPACITY: stats.capacity_misses,
            Miss.WARMUP: stats.warmup_misses,
            Miss.MEMORY: stats.memory_misses,
        }
        self._raise_to(self._hits, stats.graph_hits)
        for miss, total in misses.items():
            self._raise_to(self._misses[miss], total)
        for gauge, value in (
            (self._graphs, stats.num_graphs),
            (self._failures, stats.capture_failures),
            (self._static, static_bytes),
            (self._pool, pool_bytes),
        ):
            if self._published.get(gauge) != value:
                _update(gauge.set, value)
                self._published[gauge] = value

    def _raise_to(self, counter: Any, total: float) -> None:
        added = total - self._published.get(counter, 0)
        if added > 0:
            _update(counter.increment, added)
            self._published[counter] = total

    def add_items(self, count: int) -> None:
        _update(self._items.increment, count)

    def observe_call(self, path: str, seconds: float) -> None:
        """One call of the encoder; ``path`` is ``graph`` or ``eager``."""
        _update(self._seconds[path].observe, seconds)

    def observe_capture(self, seconds: float) -> None:
        _update(self._captures.observe, seconds)


class RequestMetrics:
    """How long requests of one model instance waited, and how long until their answers left."""

    def __init__(self, model: str, instance: str) -> None:
        labels = {"model": model, "instance": instance}
        self._families = [
            pb_utils.MetricFamily(
                name=f"minicpmo_request_{name}seconds",
                description=description,
                kind=pb_utils.MetricFamily.HISTOGRAM,
            )
            for name, description in (
                ("queue_", "Time a request waited for a worker"),
                ("", "Time from a request's arrival to its answer"),
            )
        ]
        self._queue, self._total = (
            family.Metric(labels=labels, buckets=list(REQUEST_SECONDS)) for family in self._families
        )

    def observe(self, queue_seconds: float, total_seconds: float) -> None:
        _update(self._queue.observe, queue_seconds)
        _update(self._total.observe, total_seconds)


class InFlightMetric:
    """Requests that the language model has and has not answered to the end."""

    def __init__(self, model: str, version: str) -> None:
        self._family = pb_utils.MetricFamily(
            name="minicpmo_llm_requests_in_flight",
            description="Requests taken and not yet answered to the end",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._gauge = self._family.Metric(labels={"model": model, "version": version})

    def set(self, count: int) -> None:
        _update(self._gauge.set, count)


#: Histograms with an observation for every token or iteration. Each would be a call to the server from the
#: process that streams the answers (docs/metrics.md).
_TOO_OFTEN = ("inter_token_latency", "iteration_tokens")


class EngineMetrics:
    """vLLM's own metrics under vLLM's names, from what its engine leaves behind at each iteration."""

    def __init__(self, model: str, version: str, max_model_len: int) -> None:
        self._families: list[Any] = []
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []  # label value ("" for none) -> metric
        self._labels = {"model": model, "version": version}
        for spec in VLLM_METRICS:
            if spec.field in _TOO_OFTEN:
                continue
            kind = getattr(pb_utils.MetricFamily, spec.kind.upper())
            family = pb_utils.MetricFamily(name=spec.name, description=spec.description, kind=kind)
            self._families.append(family)
            made: dict[str, Any] = {}
            if spec.kind == "histogram":
                made[""] = family.Metric(labels=self._labels, buckets=list(spec.buckets(max_model_len)))
            elif spec.label is None:
                made[""] = family.Metric(labels=self._labels)
            self._metrics.append((spec, made))

    def publish(self, records: list[EngineStats]) -> None:
        """Bring the endpoint up to date with a few iterations."""
        stats = merge(records)
        for index, (spec, made) in enumerate(self._metrics):
            value = getattr(stats, spec.field)
            if spec.label is not None:
                for name, added in value.items():
                    metric = made.get(name) or self._labelled(index, spec.label, name)
                    _update(metric.increment, added)
            elif spec.kind == "histogram":
                for observation in value:
                    _update(made[""].observe, observation)
            elif spec.kind == "gauge":
                if value is not None:
                    _update(made[""].set, value)
            elif value:
                _update(made[""].increment, value)

    def _labelled(self, index: int, label: str, value: str) -> Any:
        metric = self._families[index].Metric(labels={**self._labels, label: value})
        self._metrics[index][1][value] = metric
        return metric
