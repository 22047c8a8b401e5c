"""A device for the graph adapter without a device: CPU tensors, counted memory, recorded events."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minicpmo_triton.graphs.device import CaptureGate, Forward
from minicpmo_triton.graphs.policy import Inputs, OutputSpec

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
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
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
