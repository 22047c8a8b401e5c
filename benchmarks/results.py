"""Results of the ``encoders`` benchmark, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.subjects import Example
from benchmarks.timing import Times

WAYS = ("ordinary", "eager", "captured")
STARTS = ("device", "host")
#: A replay counts as slower than eager from here on: less is noise.
SLOWER = 1.02


@dataclass
class Result:
    """One request. Times by (start, way); errors by way, of each draw. What is not there is left out."""

    example: Example[Any]
    calls: list[str]
    floor_ms: float
    least_floor_ms: float
    times: dict[tuple[str, str], Times] = field(default_factory=dict)
    relative_errors: dict[str, list[float]] = field(default_factory=dict)

    def add_error(self, way: str, error: float) -> None:
        self.relative_errors.setdefault(way, []).append(error)

    @property
    def error_ratios(self) -> list[float]:
        """Our eager error over the ordinary module's, of each draw where that has one."""
        both = zip(self.relative_errors["eager"], self.relative_errors["ordinary"], strict=True)
        return [ours / ordinary for ours, ordinary in both if ordinary]

    def median(self, start: str, way: str) -> float | None:
        times = self.times.get((start, way))
        return None if times is None else times.median_ms

    def as_dict(self) -> dict[str, Any]:
        medians = {way: self.median("device", way) for way in WAYS}
        captured = medians["captured"]
        return {
            "request": self.example.name,
            "calls": self.calls,
            **{
                start: {way: self.times[start, way].as_dict() for way in WAYS if (start, way) in self.times}
                for start in STARTS
            },
            "floor_ms": self.floor_ms,
            "least_floor_ms": self.least_floor_ms,
            "captured_over_floor": captured and captured / self.floor_ms,
            "speedup_over_ordinary": captured and medians["ordinary"] and medians["ordinary"] / captured,
            "speedup_over_eager": captured and medians["eager"] and medians["eager"] / captured,
            "relative_errors": self.relative_errors,
            "error_ratios": self.error_ratios,
        }


@dataclass
class Graph:
    """One graph key: its times over inputs on the device, and the bytes its capture kept."""

    name: str
    eager: Times
    replay: Times
    static_bytes: int
    shared_pool_bytes: int
    private_pool_bytes: int

    @property
    def slower(self) -> bool:
        return self.replay.median_ms > SLOWER * self.eager.median_ms

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.name,
            "eager": self.eager.as_dict(),
            "replay": self.replay.as_dict(),
            "slower_than_eager": self.slower,
            "static_bytes": self.static_bytes,
            "shared_pool_bytes": self.shared_pool_bytes,
            "private_pool_bytes": self.private_pool_bytes,
        }


def times_table(results: Sequence[Result]) -> str:
    header = ["request", "inputs on", *WAYS, "floor", "x floor", "x faster than ordinary", "than eager"]
    rows = []
    for result in results:
        for start in STARTS:
            captured = result.median(start, "captured")
            bare = start == "device"
            rows.append(
                [
                    result.example.name if bare else "",
                    start,
                    *(result.times.get((start, way), "-") for way in WAYS),
                    report.ms(result.floor_ms) if bare else "",
                    report.ratio(captured, result.floor_ms) if bare else "",
                    report.ratio(result.median(start, "ordinary"), captured),
                    report.ratio(result.median(start, "eager"), captured),
                ]
            )
    return report.table(header, rows)


def errors_table(results: Sequence[Result]) -> str:
    rows = [
        [
            result.example.name,
            *(_spread(result.relative_errors.get(way, []), ".2e") for way in WAYS),
            _spread(result.error_ratios, ".3f"),
        ]
        for result in results
    ]
    return report.table(["request", *WAYS, "eager / ordinary"], rows)


def _spread(values: Sequence[float], form: str) -> str:
    """Mean, and least to largest of several."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}-{max(values):{form}})"


def graphs_table(graphs: Sequence[Graph]) -> str:
    header = ["key", "eager", "replay", "static MiB", "adds to shared pool MiB", "private pool MiB", ""]
    rows = [
        [
            graph.name,
            graph.eager,
            graph.replay,
            report.mib(graph.static_bytes),
            report.mib(graph.shared_pool_bytes),
            report.mib(graph.private_pool_bytes),
            "SLOWER" if graph.slower else "",
        ]
        for graph in graphs
    ]
    return report.table(header, rows)
