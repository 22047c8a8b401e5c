"""The encoders' graph counters, read from Triton's metrics endpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minicpmo_client.address import Address, parse_address
from minicpmo_client.errors import InvalidRequest, ServerError, ServerUnavailable
from minicpmo_client.http_wire import Exchange, ReplyReader

_PREFIX = "minicpmo_encoder_"
GRAPH_HITS = f"{_PREFIX}graph_hits_total"
GRAPH_MISSES = f"{_PREFIX}graph_misses_total"
GRAPHS = f"{_PREFIX}graphs"
CAPTURE_FAILURES = f"{_PREFIX}graph_capture_failures"
STATIC_BYTES = f"{_PREFIX}graph_static_bytes"
POOL_BYTES = f"{_PREFIX}graph_pool_bytes"
ITEMS = f"{_PREFIX}items_total"
FAMILIES = (GRAPH_HITS, GRAPH_MISSES, GRAPHS, CAPTURE_FAILURES, STATIC_BYTES, POOL_BYTES, ITEMS)

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    """One line of the metrics endpoint."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class EncoderStats:
    """Graph counters of one instance of an encoder, since it was loaded.

    ``graph_misses`` is by reason: ``warmup``, ``capacity``, ``memory``, ``ineligible``. A hit or a miss is
    one batch; ``num_items`` counts slices or audio chunks. ``capture_failures`` of 1 means that the
    instance refuses every call.
    """

    model: str
    instance: str
    device: str
    graph_hits: int
    graph_misses: Mapping[str, int]
    num_graphs: int
    capture_failures: int
    static_bytes: int
    pool_bytes: int
    num_items: int

    @property
    def num_misses(self) -> int:
        """Misses for any reason."""
        return sum(self.graph_misses.values())

    @property
    def hit_rate(self) -> float | None:
        """Hits among all calls, 0..1; None before the first call."""
        num_calls = self.graph_hits + self.num_misses
        return self.graph_hits / num_calls if num_calls else None


@dataclass(frozen=True)
class Stats:
    """A snapshot: the encoders' counters, and every sample of the endpoint, Triton's and vLLM's too."""

    encoders: tuple[EncoderStats, ...]
    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that carry these labels; 0 where there is none.

        >>> parse_metrics('nv_inference_count{model="llm"} 3').total("nv_inference_count", model="llm")
        3.0
        """
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


def parse_metrics(text: str) -> Stats:
    """Read the text of a metrics endpoint (Prometheus' exposition format)."""
    samples = tuple(_samples(text))
    keys = dict.fromkeys(_key(s) for s in samples if s.name in FAMILIES)
    return Stats(tuple(_encoder(key, samples) for key in sorted(keys)), samples)


def metrics_exchange(url: str) -> tuple[Address, Exchange]:
    """Where and what to ask for the metrics at ``url``."""
    base, _, query = url.partition("?")
    address = parse_address(base)
    if address.protocol != "http":
        raise InvalidRequest(f"metrics_url: expected http://host:8002/metrics, got {url!r}")
    return address, Exchange("GET", f"?{query}" if query else "", "raw")


def stats_from(reply: ReplyReader, url: str) -> Stats:
    """The snapshot in the endpoint's reply."""
    status, text = reply.text()
    if status == 503:
        raise ServerUnavailable(f"{url} answered with HTTP status {status}")
    if status != 200:
        raise ServerError(f"{url} answered with HTTP status {status}")
    return parse_metrics(text)


def _samples(text: str) -> Iterable[Sample]:
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.fullmatch(line.strip())
        if found is None:
            continue
        labels = {name: _unescape(value) for name, value in _LABEL.findall(found[2] or "")}
        try:
            yield Sample(found[1], labels, float(found[3]))
        except ValueError:
            continue


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


def _key(sample: Sample) -> tuple[str, str, str]:
    labels = sample.labels
    return labels.get("model", ""), labels.get("instance", ""), labels.get("device", "")


def _encoder(key: tuple[str, str, str], samples: Iterable[Sample]) -> EncoderStats:
    own = [sample for sample in samples if sample.name in FAMILIES and _key(sample) == key]
    totals = dict.fromkeys(FAMILIES, 0)
    misses: dict[str, int] = {}
    for sample in own:
        value = int(sample.value) if math.isfinite(sample.value) else 0
        totals[sample.name] += value
        if sample.name == GRAPH_MISSES:
            reason = sample.labels.get("reason", "")
            misses[reason] = misses.get(reason, 0) + value
    model, instance, device = key
    return EncoderStats(
        model,
        instance,
        device,
        graph_hits=totals[GRAPH_HITS],
        graph_misses=misses,
        num_graphs=totals[GRAPHS],
        capture_failures=totals[CAPTURE_FAILURES],
        static_bytes=totals[STATIC_BYTES],
        pool_bytes=totals[POOL_BYTES],
        num_items=totals[ITEMS],
    )
