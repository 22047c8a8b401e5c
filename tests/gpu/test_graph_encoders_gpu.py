"""Both encoders at MiniCPM-o 4.5's full size, random weights, with and without the graph adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from minicpmo_triton.encoders.batching import AudioEncoder, AudioItem, VisionEncoder, VisionItem
from minicpmo_triton.encoders.random_weights import random_audio_module, random_vision_module
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.policy import GraphSettings
from minicpmo_triton.schema import MEL_BINS, PATCH_VALUES

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
#: Largest difference, relative to the largest value, where graph and eager pick other kernels.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
KINDS = pytest.mark.parametrize("kind", ["vision", "audio"])

#: (slices, rows, columns) and seconds of audio; the first four are captured by default settings.
VISION_SHAPES = [(1, 32, 32), (2, 32, 32), (1, 24, 40), (4, 26, 36), (1, 20, 50)]
AUDIO_SECONDS = [1.0, 5.0, 12.5, 30.0, 2.0]

Encode = Callable[[int, int], Tensor]  # (which shape, seed) -> rows


@cache
def module(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    return (random_vision_module if kind == "vision" else random_audio_module)(dtype, "cuda")


def encoder(
    kind: str, dtype: torch.dtype, settings: GraphSettings | None
) -> tuple[Encode, list[GraphAdapter]]:
    """How to encode example ``which`` with values of ``seed``, and the adapter if there are settings."""
    adapters: list[GraphAdapter] = []

    def wrap(forward: object) -> GraphAdapter:
        adapters.append(GraphAdapter(forward, settings, torch.device("cuda")))
        return adapters[0]

    options = {"wrap": wrap} if settings else {}
    if kind == "vision":
        vision = VisionEncoder(module(kind, dtype), **options)
        return lambda which, seed: vision.encode([vision_item(which, seed)])[0], adapters
    audio = AudioEncoder(module(kind, dtype), **options)
    return lambda which, seed: audio.encode([audio_item(which, seed)])[0], adapters


@cache
def vision_item(which: int, seed: int) -> VisionItem:
    num_slices, rows, columns = VISION_SHAPES[which]
    random = np.random.default_rng(seed)
    patches = random.integers(0, 256, (num_slices * rows * columns, PATCH_VALUES), dtype=np.uint8)
    return VisionItem(patches, np.array([[rows, columns]] * num_slices, dtype=np.int32))


@cache
def audio_item(which: int, seed: int) -> AudioItem:
    num_frames = int(AUDIO_SECONDS[which] * 100)
    mel = np.random.default_rng(seed).standard_normal((num_frames, MEL_BINS)).astype(np.float32)
    return AudioItem(mel, np.array([num_frames], dtype=np.int32))


@KINDS
@DTYPES
def test_replay_equals_eager_for_every_captured_key(kind: str, dtype: torch.dtype) -> None:
    graphs, [adapter] = encoder(kind, dtype, GraphSettings(min_free_bytes=0))
    eager, _ = encoder(kind, dtype, None)
    for which in range(4):
        for seed in range(3):
            got, want = graphs(which, seed).float(), eager(which, seed).float()
            difference = float((got - want).abs().max() / want.abs().max())
            shape = VISION_SHAPES[which] if kind == "vision" else f"{AUDIO_SECONDS[which]} s"
            path = "replay" if seed else "first, eager call"
            print(f"\n{kind} {shape} {dtype}: {path} to eager {difference:.2e} relative")
            assert difference <= TOLERANCE[dtype]
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.graph_hits, stats.warmup_misses) == (4, 8, 4)


@KINDS
def test_results_stay_over_100_later_calls(kind: str) -> None:
    graphs, [adapter] = encoder(kind, torch.bfloat16, GraphSettings(min_free_bytes=0))
    for seed in range(2):
        graphs(0, seed)
    kept = [graphs(0, seed) for seed in range(5)]
    copies = [rows.cpu() for rows in kept]
    for i in range(100):
        graphs(i % 4, 100 + i)
    assert all(torch.equal(rows.cpu(), copy) for rows, copy in zip(kept, copies, strict=True))
    assert adapter.get_cumulative_stats().num_graphs == 4


@KINDS
def test_shared_pools_take_less_memory(kind: str) -> None:
    pool_bytes = {}
    for share in (True, False):
        graphs, [adapter] = encoder(kind, torch.bfloat16, GraphSettings(min_free_bytes=0, share_pools=share))
        for which in range(4):
            for seed in range(2):
                graphs(which, seed)
        assert adapter.get_cumulative_stats().num_graphs == 4
        pool_bytes[share] = adapter.pool_bytes
        print(f"\n{kind}: share_pools {share}: pool {adapter.pool_bytes / MIB:.0f} MiB")
        print(f"{kind}: static {adapter.static_bytes / MIB:.1f} MiB")
    assert 0 < pool_bytes[True] < pool_bytes[False]


@KINDS
def test_no_growth_over_2000_calls(kind: str) -> None:
    graphs, [adapter] = encoder(kind, torch.bfloat16, GraphSettings(min_free_bytes=0))
    for i in range(30):
        graphs(i % 5, i)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(2000):
        graphs(i % 5, i % 7)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    print(f"\n{kind}: allocated and reserved {before} before, {after} after")
    assert after == before
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.graph_hits + stats.graph_misses) == (4, 2030)
    assert stats.capacity_misses > 400
