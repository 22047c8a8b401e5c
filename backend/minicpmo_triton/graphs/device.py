"""The seam between the adapter's rules and CUDA: everything the adapter asks of a device.

Tests put a fake behind :class:`GraphDevice`; :class:`CudaGraphDevice` is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from minicpmo_triton.graphs.policy import Inputs, OutputSpec

#: An encoder's forward: capture-safe, and the same computation for equal shapes.
Forward: TypeAlias = Callable[[Inputs], Tensor]


class CaptureGate:
    """Many calls or one capture. ``with gate`` is a call, ``with gate.exclusive()`` a capture.

    CUDA forbids allocation and synchronisation anywhere in a process while one of its threads
    captures in the mode that vLLM's manager uses: either would fail, and break the capture. A capture
    that waits goes before calls that have not begun.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a forward under capture may call another adapter
        self._changed = threading.Condition(self._lock)
        self._num_calls = 0
        self._num_waiting = 0
        self._capturing = False

    def __enter__(self) -> None:
        with self._lock:
            # _capturing is seen here only by the capturing thread: it holds the lock all along.
            while self._num_waiting and not self._capturing:
                self._changed.wait()
            self._num_calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_calls -= 1
            if self._num_waiting and not self._num_calls:
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no call runs, and keep calls out. Not to be entered inside ``with gate``."""
        with self._lock:
            self._num_waiting += 1
            try:
                while self._num_calls:
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            self._capturing = True
            try:
                yield
            finally:
                self._capturing = False
                self._changed.notify_all()


class CapturedGraph(Protocol):
    """A graph with its static buffers."""

    @property
    def pool_bytes(self) -> int:
        """Device memory that the capture kept."""

    def replay(self, inputs: Inputs) -> Tensor:
        """Fill the static inputs, replay on the current stream, return a clone of the output."""


class GraphDevice(Protocol):
    """One device, as the adapter sees it. "Current" means the calling thread's current stream."""

    device: torch.device
    gate: CaptureGate

    def verify(self) -> None:
        """Raise :class:`ConfigError` when graphs cannot be captured with what is installed."""

    def stream_key(self) -> Hashable:
        """Identifies the current stream."""

    def gradients_enabled(self) -> bool: ...

    def autocast_enabled(self) -> bool: ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def free_bytes(self) -> int:
        """Memory of the device that no process has taken."""

    def new_pool(self) -> Any:
        """A memory pool with the one stream that captures into it."""

    def static_copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy outside every pool, made on the current stream."""

    def begin_after_replays(self, pool: Any) -> None:
        """Let the pool's capture stream wait for all that the current stream has been given."""

    def resume_after_capture(self, pool: Any) -> None:
        """Let the current stream wait for all that the pool's capture stream has been given."""

    def capture(
        self, forward: Forward, static_inputs: Inputs, output: OutputSpec, pool: Any
    ) -> CapturedGraph:
        """Capture ``forward`` over ``static_inputs`` into ``pool`` on the pool's stream.

        Raises what ``forward`` raised, or the device's error.
        """


@dataclass(frozen=True)
class CudaPool:
    """A memory pool of torch's allocator and the stream its graphs are captured on.

    One stream a pool: torch reuses a pool's memory only on the stream it was allocated on, and
    cuBLAS keeps a workspace a stream, which graphs replayed at the same time must not share.
    """

    handle: Any
    stream: torch.cuda.Stream


class CudaGraphDevice:
    """A CUDA device. Captures go through vLLM's encoder graph manager."""

    #: One for the process, as CUDA's rule is.
    gate = CaptureGate()

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    def verify(self) -> None:
        from minicpmo_triton.graphs import manager  # imports vLLM, which takes seconds

        manager.load()
        # The signatures fit; whether this vLLM, torch and driver capture and replay, only a trial tells.
        with torch.inference_mode(), manager.load_errors("a trial capture failed"), self.gate.exclusive():
            ones, pool = torch.ones(1, device=self.device), self.new_pool()
            static_inputs = {"values": self.static_copy(ones)}
            self.begin_after_replays(pool)
            graph = self.capture(_add_one, static_inputs, OutputSpec.of(ones), pool)
            self.resume_after_capture(pool)
            if (result := graph.replay({"values": ones * 2}).item()) != 3:
                raise RuntimeError(f"its replay computed 2 + 1 = {result}")

    def stream_key(self) -> Hashable:
        return torch.cuda.current_stream(self.device).cuda_stream

    def gradients_enabled(self) -> bool:
        return torch.is_grad_enabled()

    def autocast_enabled(self) -> bool:
        return torch.is_autocast_enabled("cuda")

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def new_pool(self) -> CudaPool:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            return CudaPool(torch.cuda.graph_pool_handle(), stream)

    def static_copy(self, tensor: Tensor) -> Tensor:
        # An ordinary tensor even in inference mode: later calls, in whichever mode, copy into it.
        with torch.inference_mode(False):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)

    def begin_after_replays(self, pool: CudaPool) -> None:
        pool.stream.wait_stream(torch.cuda.current_stream(self.device))

    def resume_after_capture(self, pool: CudaPool) -> None:
        torch.cuda.current_stream(self.device).wait_stream(pool.stream)

    def capture(
        self, forward: Forward, static_inputs: Inputs, output: OutputSpec, pool: CudaPool
    ) -> CapturedGraph:
        from minicpmo_triton.graphs.manager import ManagedGraph

        graph = ManagedGraph(forward, static_inputs, output, self.device)
        with torch.cuda.device(self.device), _capturing_on(pool.stream):
            reserved_bytes = self._reserved_bytes()
            graph.capture(pool.handle)
            graph.pool_bytes = max(0, self._reserved_bytes() - reserved_bytes)
        return graph

    def _reserved_bytes(self) -> int:
        # Without its idle blocks, torch's reserve is what live tensors and graphs' pools hold.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)


@contextmanager
def _capturing_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make vLLM's manager warm up and capture on ``stream``.

    vLLM 0.32 captures on the current stream, 0.26 on torch's default capture stream, which is one
    for the process. The gate keeps other captures of this process out meanwhile. The outer stream
    context also restores the stream after a capture that fails, which torch's own does not.
    """
    default = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = stream
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.graph.default_capture_stream = default


def _add_one(inputs: Inputs) -> Tensor:
    values = inputs["values"]
    assert values is not None
    return values + 1


def graph_device(device: torch.device) -> GraphDevice | None:
    """The seam for ``device``; ``None`` where there are no graphs (a CPU)."""
    return CudaGraphDevice(device) if device.type == "cuda" else None


def static_bytes(static_inputs: Mapping[str, Tensor | None], output: OutputSpec) -> int:
    """Bytes of a graph's static input and output buffers."""
    return output.num_bytes + sum(t.nbytes for t in static_inputs.values() if t is not None)
