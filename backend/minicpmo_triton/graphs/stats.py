"""What an adapter counts. A call counts once it is answered; a call that raises counts nowhere.

So ``graph_hits + graph_misses`` is the number of calls answered. The call that captures a graph is
answered by that graph's first replay and is a hit. A capture that fails counts only in
``capture_failures``, and so do none of the calls refused after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Miss(Enum):
    """Why an answered call ran eagerly; the value is the ``reason`` label on the metrics endpoint."""

    #: Graphs are off, or the call cannot be captured: see :mod:`minicpmo_triton.graphs.policy`.
    INELIGIBLE = "ineligible"
    #: ``max_graphs`` graphs exist (or it is 0), and this is none of their shapes.
    CAPACITY = "capacity"
    #: The shape has not been called ``min_capture_calls`` times yet.
    WARMUP = "warmup"
    #: The device had less than ``min_free_bytes`` free.
    MEMORY = "memory"


@dataclass(frozen=True)
class GraphStats:
    """Totals since the adapter was made. ``graph_misses`` is the sum of the four ``*_misses``."""

    graph_hits: int = 0
    graph_misses: int = 0
    hit_rate: float = 0.0
    num_graphs: int = 0
    ineligible_misses: int = 0
    capacity_misses: int = 0
    warmup_misses: int = 0
    memory_misses: int = 0
    capture_failures: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """Field name -> value."""
        return asdict(self)


class Counters:
    """The running totals behind :class:`GraphStats`."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = dict.fromkeys(Miss, 0)
        self.capture_failures = 0

    def snapshot(self, num_graphs: int) -> GraphStats:
        """The totals now."""
        num_misses = sum(self.misses.values())
        num_calls = self.hits + num_misses
        return GraphStats(
            graph_hits=self.hits,
            graph_misses=num_misses,
            hit_rate=self.hits / num_calls if num_calls else 0.0,
            num_graphs=num_graphs,
            ineligible_misses=self.misses[Miss.INELIGIBLE],
            capacity_misses=self.misses[Miss.CAPACITY],
            warmup_misses=self.misses[Miss.WARMUP],
            memory_misses=self.misses[Miss.MEMORY],
            capture_failures=self.capture_failures,
        )
