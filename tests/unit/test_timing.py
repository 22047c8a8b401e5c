"""Times of encoder calls: by path, captures left out, each call once."""

from __future__ import annotations

import torch

from minicpmo_triton.encoders.timing import TimedForward
from minicpmo_triton.graphs.stats import GraphStats

CPU = torch.device("cpu")


def test_calls_are_timed_by_path_and_captures_left_out() -> None:
    # Totals after each call: an eager one, one that captures, a replay.
    after = [
        GraphStats(graph_misses=1),
        GraphStats(graph_hits=1, num_graphs=1),
        GraphStats(graph_hits=2, num_graphs=1),
    ]
    totals = [GraphStats()]

    def forward(inputs: object) -> torch.Tensor:
        totals.append(after[len(totals) - 1])
        return torch.zeros(1)

    timed = TimedForward(forward, CPU, lambda: totals[-1])
    for _ in after:
        timed({})
    calls = timed.take()
    assert [call.by_graph for call in calls] == [False, True]
    assert all(0 < call.seconds < 1 for call in calls)
    assert timed.take() == []


def test_a_call_that_raises_is_not_timed() -> None:
    def forward(inputs: object) -> torch.Tensor:
        raise ValueError

    timed = TimedForward(forward, CPU, GraphStats)
    for _ in range(2):
        try:
            timed({})
        except ValueError:
            continue
    assert timed.take() == []
