"""A mixture of image sizes and audio lengths against the encoders' graphs, for several ``max_graphs``.

    python -m benchmarks.traffic

Requests arrive one at a time. Each becomes encoder calls by the project's own planning (slices, chunks,
batches of powers of two); its latency is from host arrays to rows on the device, on an idle device. Each
``max_graphs`` starts without a graph and sees the same requests in the same order. A request that
captured is left out of the percentiles, and its pause stands beside them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.mixture import Request, audio_requests, best_hit_rate, vision_requests
from benchmarks.subjects import Seam, Subject, adapter_maker, add_options, device_and_dtype, subjects
from benchmarks.timing import synchronize
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.graphs.stats import Miss

REASONS = tuple(reason.value for reason in Miss)


@dataclass(frozen=True)
class Replayed:
    """The traffic against one ``max_graphs``.

    Latencies are those of requests without a capture. ``best_hit_rate`` is what the most frequent keys
    would give, captured beforehand. ``saved_ms`` is the mean of what a request saves over its own
    latency without graphs; after ``pays_after`` requests at that rate the captures' time is paid.
    """

    max_graphs: int
    hit_rate: float
    best_hit_rate: float
    misses: dict[str, int]
    num_graphs: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    saved_ms: float | None
    capture_s: float
    longest_pause_ms: float
    pays_after: float | None
    static_bytes: int
    pool_bytes: int


class Latencies:
    """Milliseconds of each request in order, and whether it captured; and the captures' seconds."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.captured: list[bool] = []
        self.capture_seconds: list[float] = []

    def add(self, milliseconds: float, captured: bool) -> None:
        self.milliseconds.append(milliseconds)
        self.captured.append(captured)

    def undisturbed(self) -> dict[int, float]:
        """Of the requests without a capture, by their place."""
        return {
            place: each
            for place, (each, captured) in enumerate(zip(self.milliseconds, self.captured, strict=True))
            if not captured
        }

    def longest_pause_ms(self) -> float:
        pauses = [each for each, captured in zip(self.milliseconds, self.captured, strict=True) if captured]
        return max(pauses, default=0.0)


def run(
    encode: Callable[[Any], object], requests: Sequence[Request], device: torch.device, latencies: Latencies
) -> None:
    """Send every request by itself, on an idle device, and note how long it took."""
    for request in requests:
        num_captures = len(latencies.capture_seconds)
        synchronize(device)
        started = time.perf_counter()
        encode(request.item)
        synchronize(device)
        seconds = time.perf_counter() - started
        latencies.add(seconds * 1000, captured=len(latencies.capture_seconds) > num_captures)


def replay(
    subject: Subject[Any],
    requests: Sequence[Request],
    max_graphs: int,
    device: torch.device,
    baseline: dict[int, float] | None,
    seam: Seam | None,
) -> tuple[Replayed, dict[int, float]]:
    """The traffic against a new adapter; also the latencies without a capture, by the request's place.

    ``baseline`` has those without graphs: what a request saves is measured against its own.
    """
    latencies = Latencies()
    adapters: list[GraphAdapter] = []
    make = adapter_maker(device, seam, latencies.capture_seconds.append, max_graphs=max_graphs)

    def wrap(forward: Forward) -> GraphAdapter:
        adapters.append(make(forward))
        return adapters[0]

    run(subject.encoder(wrap), requests, device, latencies)
    [adapter] = adapters
    undisturbed = latencies.undisturbed()
    p50, p90, p99 = np.percentile(list(undisturbed.values()), (50, 90, 99)).tolist()
    saved = None
    if baseline is not None:
        saved = float(np.mean([baseline[place] - each for place, each in undisturbed.items()]))
    capture_s = sum(latencies.capture_seconds)
    stats = adapter.get_cumulative_stats()
    result = Replayed(
        max_graphs,
        stats.hit_rate,
        best_hit_rate(requests, max_graphs),
        {reason: getattr(stats, f"{reason}_misses") for reason in REASONS},
        stats.num_graphs,
        p50,
        p90,
        p99,
        float(np.mean(list(undisturbed.values()))),
        saved,
        capture_s,
        latencies.longest_pause_ms(),
        capture_s * 1000 / saved if saved and saved > 0 and capture_s else None,
        adapter.static_bytes,
        adapter.pool_bytes,
    )
    return result, undisturbed


def warm_up(subject: Subject[Any], requests: Sequence[Request], device: torch.device) -> None:
    """Every shape once, so that what a library prepares for a new shape falls on no measurement."""
    encode = subject.encoder()
    for request in {request.keys: request for request in requests}.values():
        encode(request.item)
    synchronize(device)


def hits_table(rows: Sequence[Replayed]) -> str:
    header = ["max_graphs", "graphs", "hit rate", "best possible"]
    reasons = [f"{reason} misses" for reason in REASONS]
    return report.table(
        [*header, *reasons, "static MiB", "pool MiB"],
        [
            [
                row.max_graphs,
                row.num_graphs,
                f"{row.hit_rate * 100:.1f}%",
                f"{row.best_hit_rate * 100:.1f}%",
                *(row.misses[reason] for reason in REASONS),
                report.mib(row.static_bytes),
                report.mib(row.pool_bytes),
            ]
            for row in rows
        ],
    )


def latency_table(rows: Sequence[Replayed]) -> str:
    header = ["max_graphs", "p50 ms", "p90 ms", "p99 ms", "mean ms", "saved ms each"]
    return report.table(
        [*header, "captures s", "longest pause ms", "pays after requests"],
        [
            [
                row.max_graphs,
                *map(report.ms, (row.p50_ms, row.p90_ms, row.p99_ms, row.mean_ms, row.saved_ms)),
                report.ms(row.capture_s),
                f"{row.longest_pause_ms:.0f}",
                "-" if row.pays_after is None else f"{row.pays_after:.0f}",
            ]
            for row in rows
        ],
    )


def run_subject(
    subject: Subject[Any], device: torch.device, options: argparse.Namespace, seam: Seam | None
) -> dict[str, Any]:
    """Measure and print one encoder; its part of the JSON line."""
    make_requests = vision_requests if subject.name == "vision" else audio_requests
    requests = make_requests(options.requests, options.seed, options.max_slice_nums)
    counts = Counter(key for request in requests for key in request.keys)
    warm_up(subject, requests, device)
    baseline: dict[int, float] | None = None
    rows = []
    for max_graphs in options.max_graphs:
        row, undisturbed = replay(subject, requests, max_graphs, device, baseline, seam)
        rows.append(row)
        if max_graphs == 0:
            baseline = undisturbed
        gc.collect()  # the graphs of this adapter, before the next one's memory is measured
    twice = sum(count > 1 for count in counts.values())
    print(
        f"\n{subject.name}: {len(requests)} requests, {counts.total()} calls of {len(counts)} keys,"
        f" {twice} of them more than once; the most frequent:"
        f" {', '.join(f'{key} ({count})' for key, count in counts.most_common(8))}"
    )
    print(hits_table(rows))
    print(latency_table(rows))
    return {
        "num_requests": len(requests),
        "num_calls": counts.total(),
        "num_keys": len(counts),
        "num_repeated_keys": twice,
        "max_graphs": [asdict(row) for row in rows],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--requests", type=int, help="for each encoder; default: 250, with --tiny 12")
    parser.add_argument(
        "--max-graphs",
        type=int,
        nargs="+",
        metavar="N",
        help="encoder_cuda_graph_max_graphs to try, in this order; what is saved is measured against 0,"
        " so put it first; default: 0 4 8 16 32, with --tiny 0 2",
    )
    parser.add_argument("--max-slice-nums", type=int, default=9, help="slices of a picture; default: 9")
    options = parser.parse_args(argv)
    options.requests = options.requests or (12 if options.tiny else 250)
    options.max_graphs = options.max_graphs or ([0, 2] if options.tiny else [0, 4, 8, 16, 32])
    return options


def main(argv: Sequence[str] | None = None, seam: Seam | None = None) -> None:
    """Run the command. ``seam`` stands in for the device's graphs in tests."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    device, dtype = device_and_dtype(options)
    about = report.environment("traffic", argv, device, dtype)
    print(report.heading(about))
    parts: dict[str, Any] = {}
    with torch.inference_mode():
        for name, make in subjects(options, device, dtype).items():
            parts[name] = run_subject(make(options.seed), device, options, seam)
            gc.collect()
    print(report.json_line({**about, **parts}))


if __name__ == "__main__":
    main()
