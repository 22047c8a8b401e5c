"""Random calls against a ten-line model of the rules."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

from .graph_fake import FakeDevice

FLOOR = 1000


class Call(NamedTuple):
    num_rows: int
    stream: str
    eligible: bool
    enough_memory: bool
    raises: bool


CALLS = st.lists(
    st.builds(
        Call,
        num_rows=st.integers(1, 12),
        stream=st.sampled_from(["main", "main", "side"]),
        eligible=st.sampled_from([True, True, True, False]),
        enough_memory=st.sampled_from([True, True, False]),
        raises=st.sampled_from([False] * 9 + [True]),
    ),
    max_size=120,
)


class Rules:
    """What each call counts as."""

    def __init__(self, max_graphs: int, min_calls: int) -> None:
        self.max_graphs, self.min_calls = max_graphs, min_calls
        self.graphs: set[tuple[int, str]] = set()
        self.history: dict[tuple[int, str], int] = {}

    def outcome(self, call: Call) -> str:
        key = (call.num_rows, call.stream)
        if not call.eligible:
            return "ineligible"
        if key in self.graphs:
            return "hit"
        if len(self.graphs) >= self.max_graphs:
            return "capacity"
        if self.history.get(key, 0) + 1 < self.min_calls:
            return "warmup"
        return "hit" if call.enough_memory else "memory"

    def after(self, call: Call, outcome: str) -> None:
        key = (call.num_rows, call.stream)
        if outcome == "warmup":
            self.history[key] = self.history.get(key, 0) + 1
            if len(self.history) > 4 * self.max_graphs:
                del self.history[next(iter(self.history))]
        if outcome == "hit":
            self.graphs.add(key)
            self.history.pop(key, None)


class Failure(Exception):
    pass


@settings(max_examples=150, deadline=None)
@given(CALLS, st.integers(0, 3), st.integers(2, 4), st.booleans())
def test_every_call_counts_as_the_rules_say(
    calls: list[Call], max_graphs: int, min_calls: int, share_pools: bool
) -> None:
    device, raising = FakeDevice(), False

    def forward(inputs: Inputs) -> Tensor:
        if raising:
            raise Failure
        rows = inputs["rows"]
        assert rows is not None
        return rows * 2

    adapter = GraphAdapter(
        forward, GraphSettings(True, max_graphs, min_calls, FLOOR, share_pools), torch.device("cpu"), device
    )
    rules, expected = Rules(max_graphs, min_calls), Counter[str]()
    kept: list[tuple[float, Tensor]] = []
    for i, call in enumerate(calls):
        device.stream, device.autocast = call.stream, not call.eligible
        device.free = FLOOR if call.enough_memory else FLOOR - 1
        outcome = rules.outcome(call)
        raising = call.raises and outcome != "hit"  # an eager call that raises counts nowhere
        try:
            output = adapter({"rows": torch.full((call.num_rows,), float(i))})
        except Failure:
            assert raising
            continue
        assert not raising
        kept.append((2.0 * i, output))
        expected[outcome] += 1
        rules.after(call, outcome)

        stats = adapter.get_cumulative_stats()
        assert stats.graph_hits == expected["hit"]
        assert stats.ineligible_misses == expected["ineligible"]
        assert stats.capacity_misses == expected["capacity"]
        assert stats.warmup_misses == expected["warmup"]
        assert stats.memory_misses == expected["memory"]
        assert stats.graph_hits + stats.graph_misses == len(kept)
        assert stats.num_graphs == len(rules.graphs) <= max_graphs
    assert all(torch.equal(output, torch.full_like(output, value)) for value, output in kept)
    num_streams = len({stream for _, stream in rules.graphs})
    assert len(device.pools) == (num_streams if share_pools else len(rules.graphs))
