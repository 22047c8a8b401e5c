"""How long each call of an encoder took, without waiting for the device in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.graphs.policy import Inputs
from minicpmo_triton.graphs.stats import GraphStats


@dataclass(frozen=True)
class CallTime:
    """One call: whether a graph answered it, and its time on the device in seconds."""

    by_graph: bool
    seconds: float


class TimedForward:
    """Wraps a graph adapter; :meth:`take` gives the calls since the last time.

    On a GPU a call is timed between two events on its stream, so :meth:`take` belongs where the results
    are on the host already. A call that captured is left out: its time is the capture's. ``totals``
    reads the adapter's counters.
    """

    def __init__(self, forward: Forward, device: torch.device, totals: Callable[[], GraphStats]) -> None:
        self._forward = forward
        self._on_gpu = device.type == "cuda"
        self._totals = totals
        self._calls: list[tuple[bool, Any, Any]] = []

    def __call__(self, inputs: Inputs) -> Tensor:
        before = self._totals()
        started = self._now()
        output = self._forward(inputs)
        ended = self._now()
        after = self._totals()
        if after.num_graphs == before.num_graphs:
            self._calls.append((after.graph_hits > before.graph_hits, started, ended))
        return output

    def take(self) -> list[CallTime]:
        """The calls since the last time; waits for those still on the device."""
        calls, self._calls = self._calls, []
        return [CallTime(by_graph, self._between(start, end)) for by_graph, start, end in calls]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
