"""Which call may be captured, and when: pure rules, without a device and without torch's state.

A call that may be captured at all has a :data:`GraphKey`; calls of equal keys may share a graph.
:func:`admit` says why such a call runs eagerly for now, or that it is time to capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from minicpmo_triton.config import EncoderParameters
from minicpmo_triton.graphs.stats import Miss

Inputs: TypeAlias = Mapping[str, Tensor | None]
#: (stream, then per input in order of name: (name, None or (shape, dtype, device))).
GraphKey: TypeAlias = tuple[Hashable, ...]

#: History entries kept for each graph that may exist.
HISTORY_PER_GRAPH = 4


@dataclass(frozen=True)
class GraphSettings:
    """The operator's choices; names without prefix are those of :class:`EncoderParameters`."""

    enabled: bool = True
    max_graphs: int = 4
    min_capture_calls: int = 2
    min_free_bytes: int = 1024**3
    share_pools: bool = True

    @classmethod
    def from_parameters(cls, parameters: EncoderParameters) -> GraphSettings:
        """``enforce_eager`` disables graphs, whatever ``encoder_cuda_graph`` says."""
        return cls(
            enabled=parameters.encoder_cuda_graph and not parameters.enforce_eager,
            max_graphs=parameters.encoder_cuda_graph_max_graphs,
            min_capture_calls=parameters.encoder_cuda_graph_min_capture_calls,
            min_free_bytes=parameters.encoder_cuda_graph_min_free_bytes,
            share_pools=parameters.encoder_cuda_graph_share_pools,
        )


@dataclass(frozen=True)
class OutputSpec:
    """What a forward returned for a key; every later call of the key must return the same."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, output: Tensor) -> OutputSpec:
        return cls(output.shape, output.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def graph_key(stream: Hashable, inputs: Inputs) -> GraphKey:
    """Exact: stream, and each input's presence, shape, dtype and device.

    An input given as ``None`` and one left out are different keys. Strides are not part of it,
    because a graph reads contiguous copies.
    """
    key: list[Hashable] = [stream]
    for name in sorted(inputs):
        tensor = inputs[name]
        key.append((name, tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device)))
    return tuple(key)


def all_on(device: torch.device, inputs: Inputs) -> bool:
    """Whether there is a tensor and every tensor is on ``device`` (no CPU tensors, no mixture)."""
    found = False
    for tensor in inputs.values():
        if tensor is not None:
            if tensor.device != device:
                return False
            found = True
    return found


@dataclass
class Seen:
    """A key that has run eagerly and is not captured: how often, and what came out."""

    output: OutputSpec
    num_calls: int = 1


class History:
    """Keys not captured yet, at most ``capacity`` of them; the first recorded leaves first.

    A key that left starts counting again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: dict[GraphKey, Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def find(self, key: GraphKey) -> Seen | None:
        return self._seen.get(key)

    def record(self, key: GraphKey, output: OutputSpec) -> None:
        """Count one eager call of ``key``."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.num_calls += 1
            return
        if len(self._seen) >= self._capacity:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = Seen(output)

    def forget(self, key: GraphKey) -> None:
        del self._seen[key]


def admit(
    settings: GraphSettings, num_graphs: int, seen: Seen | None, free_bytes: Callable[[], int]
) -> Miss | None:
    """Why a key without a graph runs eagerly this time; ``None``: capture it now.

    Capacity is asked before warm-up: graphs are never evicted, so when there is no room left a new
    shape will never be captured. It needs no history, and the operator should read "capacity" (raise
    ``max_graphs``), not "warmup". The device's memory is asked last, as it costs a driver call.
    """
    if num_graphs >= settings.max_graphs:
        return Miss.CAPACITY
    if seen is None or seen.num_calls + 1 < settings.min_capture_calls:
        return Miss.WARMUP
    if settings.min_free_bytes and free_bytes() < settings.min_free_bytes:
        return Miss.MEMORY
    return None
