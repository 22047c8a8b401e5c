"""Bounded, exact-shape CUDA graphs around an encoder's forward.

The rules of a captured graph: what varies between calls is copied into its static inputs or is part
of its key; its buffers are never rebound; its output is cloned, so a result belongs to the caller;
one caller at a time. The adapter's lock sees to the last, so calls from several threads are safe and
queue. Adapters do not share anything but the process-wide gate that keeps other calls away from a
capture: each has its own keys, graphs, pools and counters. Other CUDA work of the same process, such
as copies to the device on another thread, has to keep away from a capture as well: do it inside
``with adapter.gate``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minicpmo_triton.errors import Unavailable
from minicpmo_triton.graphs.device import (
    CapturedGraph,
    CaptureGate,
    Forward,
    GraphDevice,
    graph_device,
    static_bytes,
)
from minicpmo_triton.graphs.policy import (
    HISTORY_PER_GRAPH,
    GraphKey,
    GraphSettings,
    History,
    Inputs,
    OutputSpec,
    admit,
    all_on,
    graph_key,
)
from minicpmo_triton.graphs.stats import Counters, GraphStats, Miss

logger = logging.getLogger(__name__)

REMEDY = "restart; or set encoder_cuda_graph to false"


@dataclass(frozen=True)
class _Record:
    """A captured graph and what it holds. ``pool`` is kept for as long as the graph."""

    graph: CapturedGraph
    pool: Any
    static_bytes: int


class GraphAdapter:
    """Call it as the forward it wraps: same inputs, same result, replayed where a graph exists.

    The decision, in order: refuse after a failed capture; ineligible -> eager; a graph of this key ->
    replay; then :func:`~minicpmo_triton.graphs.policy.admit`: capacity, warm-up, memory -> eager,
    else capture and replay. ``device`` is the encoder's; ``on_capture`` gets each capture's seconds;
    ``seam`` is for tests.

    Raises :class:`ConfigError` when graphs are wanted and the installed vLLM cannot make them.
    """

    def __init__(
        self,
        forward: Forward,
        settings: GraphSettings,
        device: torch.device,
        seam: GraphDevice | None = None,
        on_capture: Callable[[float], None] | None = None,
    ) -> None:
        self._forward = forward
        self._settings = settings
        self._device = seam or graph_device(device)
        self._on_capture = on_capture
        #: Hold it (``with adapter.gate``) around other CUDA work of this process on another thread.
        self.gate = self._device.gate if self._device else CaptureGate()
        self._lock = threading.RLock()  # re-entrant: on_capture may read the counters
        self._records: dict[GraphKey, _Record] = {}
        self._history = History(HISTORY_PER_GRAPH * settings.max_graphs)
        self._shared_pools: dict[Hashable, Any] = {}
        self._counters = Counters()
        self._failed: BaseException | None = None
        if self._device and settings.enabled and settings.max_graphs:
            self._device.verify()

    def __call__(self, inputs: Inputs) -> Tensor:
        """The forward's result, owned by the caller.

        Raises what the forward raises, the original error of a capture that fails, and
        :class:`Unavailable` on every call after that.
        """
        with self._lock:
            if self._failed is not None:
                raise self._unavailable() from self._failed
            with self.gate:
                key = self._key(inputs)
                if key is None:
                    return self._run_eagerly(inputs, Miss.INELIGIBLE)
                record = self._records.get(key)
                if record is not None:
                    output = record.graph.replay(inputs)
                    self._counters.hits += 1
                    return output
                miss = self._admit(key)
                if miss is not None:
                    return self._run_eagerly(_contiguous(inputs), miss, key)
            return self._capture(key, inputs)  # outside the gate, which it enters alone

    @property
    def failed(self) -> BaseException | None:
        """The error of the capture that failed, if one has."""
        return self._failed

    @property
    def static_bytes(self) -> int:
        """Device memory of all graphs' static input and output buffers."""
        return sum(record.static_bytes for record in self._records.copy().values())

    @property
    def pool_bytes(self) -> int:
        """Device memory that all captures kept, as measured."""
        return sum(record.graph.pool_bytes for record in self._records.copy().values())

    def get_cumulative_stats(self) -> GraphStats:
        """Totals of this adapter; :mod:`~minicpmo_triton.graphs.stats` says what counts."""
        with self._lock:
            return self._counters.snapshot(len(self._records))

    def _key(self, inputs: Inputs) -> GraphKey | None:
        """The key of a call that may be captured; ``None`` for an ineligible one."""
        device = self._device
        if (
            device is None
            or not self._settings.enabled
            or not all_on(device.device, inputs)
            or device.gradients_enabled()
            or device.autocast_enabled()
            or device.is_capturing()
        ):
            return None
        return graph_key(device.stream_key(), inputs)

    def _admit(self, key: GraphKey) -> Miss | None:
        assert self._device is not None
        return admit(self._settings, len(self._records), self._history.find(key), self._device.free_bytes)

    def _run_eagerly(self, inputs: Inputs, miss: Miss, key: GraphKey | None = None) -> Tensor:
        output = self._forward(inputs)
        self._counters.misses[miss] += 1
        if key is not None and miss is Miss.WARMUP:
            self._history.record(key, OutputSpec.of(output))
        return output

    def _capture(self, key: GraphKey, inputs: Inputs) -> Tensor:
        started = time.perf_counter()
        try:
            record, output = self._capture_and_replay(key, inputs)
        except BaseException as error:
            self._failed = error
            self._counters.capture_failures = 1
            logger.exception("CUDA graph capture failed; this encoder refuses further calls: %s", REMEDY)
            raise
        seconds = time.perf_counter() - started
        self._records[key] = record
        self._history.forget(key)
        self._counters.hits += 1
        logger.info(
            "captured CUDA graph %d of %d in %.2f s: %d static bytes, %d pool bytes",
            len(self._records),
            self._settings.max_graphs,
            seconds,
            record.static_bytes,
            record.graph.pool_bytes,
        )
        if self._on_capture is not None:
            self._on_capture(seconds)
        return output

    def _capture_and_replay(self, key: GraphKey, inputs: Inputs) -> tuple[_Record, Tensor]:
        device, seen = self._device, self._history.find(key)
        assert device is not None
        assert seen is not None
        with self.gate.exclusive():
            pool = self._pool(key[0])
            static = {name: t if t is None else device.static_copy(t) for name, t in inputs.items()}
            # Earlier replays use the pool's memory, and their clones read what it feeds: the capture
            # stream starts after both, and after the copies just made.
            device.begin_after_replays(pool)
            graph = device.capture(self._forward, static, seen.output, pool)
            # The warm-up on the capture stream reads the static inputs that the replay refills.
            device.resume_after_capture(pool)
            output = graph.replay(inputs)
        if OutputSpec.of(output) != seen.output:
            raise RuntimeError(
                f"the forward returned {seen.output} eagerly and {OutputSpec.of(output)} captured"
            )
        return _Record(graph, pool, static_bytes(static, seen.output)), output

    def _pool(self, stream: Hashable) -> Any:
        """Shared by this adapter's graphs of one replay stream (replays there cannot overlap), or new."""
        assert self._device is not None
        if not self._settings.share_pools:
            return self._device.new_pool()
        if stream not in self._shared_pools:
            self._shared_pools[stream] = self._device.new_pool()
        return self._shared_pools[stream]

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"a CUDA graph capture of this encoder failed ({self._failed!r}); {REMEDY}")


def _contiguous(inputs: Inputs) -> Inputs:
    """What a graph would read: eager and captured runs take the same kernels."""
    return {name: t if t is None else t.contiguous() for name, t in inputs.items()}
