"""A device for the graph adapter without a device: CPU tensors, counted memory, recorded events."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import CaptureGate, Forward
from minicpmo_triton.graphs.policy import GraphSettings, Inputs, OutputSpec

CPU = torch.device("cpu")
POOL_BYTES = 1000


@dataclass(frozen=True)
class FakePool:
    """A pool and the one stream that captures into it; ``name`` is also the stream's."""

    name: str


@dataclass
class FakeGraph:
    """Runs the forward again over its static buffers, as a replay would."""

    device: FakeDevice
    forward: Forward
    static_inputs: Inputs
    output: Tensor
    pool_bytes: int = POOL_BYTES

    def replay(self, inputs: Inputs) -> Tensor:
        self.device.events.append(f"replay on {self.device.stream}")
        assert inputs.keys() == self.static_inputs.keys()
        for name, buffer in self.static_inputs.items():
            if buffer is not None:
                values = inputs[name]
                assert values is not None
                assert values.shape == buffer.shape
                buffer.copy_(values)
        self.output.copy_(self.forward(self.static_inputs))
        return self.output.clone()


@dataclass
class FakeDevice:
    """State is set by the test; ``events`` is what the adapter asked for, in order."""

    gate: CaptureGate = field(default_factory=CaptureGate)
    device: torch.device = CPU
    stream: str = "main"
    gradients: bool = False
    autocast: bool = False
    capturing: bool = False
    free: int = 1 << 40
    num_free_asked: int = 0
    capture_error: BaseException | None = None
    verify_error: Exception | None = None
    pools: list[FakePool] = field(default_factory=list)
    graphs: list[FakeGraph] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def verify(self) -> None:
        self.events.append("verify")
        if self.verify_error is not None:
            raise self.verify_error

    def stream_key(self) -> Hashable:
        return self.stream

    def gradients_enabled(self) -> bool:
        return self.gradients

    def autocast_enabled(self) -> bool:
        return self.autocast

    def is_capturing(self) -> bool:
        return self.capturing

    def free_bytes(self) -> int:
        self.num_free_asked += 1
        return self.free

    def new_pool(self) -> FakePool:
        self.pools.append(FakePool(f"pool{len(self.pools)}"))
        return self.pools[-1]

    def static_copy(self, tensor: Tensor) -> Tensor:
        self.events.append("static copy")
        return tensor.clone(memory_format=torch.contiguous_format)

    def begin_after_replays(self, pool: FakePool) -> None:
        self.events.append(f"{pool.name} waits for {self.stream}")

    def resume_after_capture(self, pool: FakePool) -> None:
        self.events.append(f"{self.stream} waits for {pool.name}")

    def capture(
        self, forward: Forward, static_inputs: Inputs, output: OutputSpec, pool: FakePool
    ) -> FakeGraph:
        self.events.append(f"capture on {pool.name}")
        if self.capture_error is not None:
            raise self.capture_error
        graph = FakeGraph(self, forward, static_inputs, torch.empty_like(forward(static_inputs)))
        self.graphs.append(graph)
        return graph


class Encoder:
    """Twice its input, plus the bias when there is one; counts its runs."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.error: Exception | None = None

    def __call__(self, inputs: Inputs) -> Tensor:
        self.num_runs += 1
        if self.error is not None:
            raise self.error
        rows, bias = inputs["rows"], inputs.get("bias")
        assert rows is not None
        return rows * 2 if bias is None else rows * 2 + bias


class Case:
    """An adapter over a fake device; ``call(n)`` encodes n rows and checks the result."""

    def __init__(self, device: FakeDevice | None = None, **settings: Any) -> None:
        self.device = device or FakeDevice()
        self.encoder = Encoder()
        self.capture_seconds: list[float] = []
        self.adapter = GraphAdapter(
            self.encoder, GraphSettings(**settings), CPU, self.device, self.capture_seconds.append
        )
        self.num_calls = 0

    def call(self, num_rows: int) -> Tensor:
        self.num_calls += 1
        rows = torch.full((num_rows, 2), float(self.num_calls))
        output = self.adapter({"rows": rows})
        assert torch.equal(output, rows * 2)
        return output

    def misses(self) -> dict[str, int]:
        """Misses by reason, without those that are zero."""
        stats = self.adapter.get_cumulative_stats().as_dict()
        suffix = "_misses"
        return {
            name.removesuffix(suffix): int(n)
            for name, n in stats.items()
            if name.endswith(suffix) and name != "graph_misses" and n
        }

    @property
    def hits(self) -> int:
        return self.adapter.get_cumulative_stats().graph_hits

    @property
    def num_captures(self) -> int:
        return len(self.device.graphs)
