"""The graph adapter on a real device, over small modules: values, streams, threads, failure, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDTH = 256
MIB = 1 << 20
SLEEP_CYCLES = 50_000_000  # about 30 ms of a busy device


class Mlp(nn.Module):
    """A few layers with matrix products, so that cuBLAS and its workspaces take part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, inputs: Inputs) -> Tensor:
        rows, bias = inputs["rows"], inputs.get("bias")
        assert rows is not None
        output: Tensor = self.layers(rows)
        return output if bias is None else output + bias


@pytest.fixture(scope="module")
def mlp() -> Mlp:
    return Mlp().cuda().requires_grad_(False)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def adapter_over(forward: Callable[[Inputs], Tensor], **settings: Any) -> GraphAdapter:
    settings = {"min_free_bytes": 0, **settings}
    return GraphAdapter(forward, GraphSettings(**settings), torch.device("cuda"))


def random_rows(num_rows: int, seed: int) -> Tensor:
    # Drawn on the host: a failed capture elsewhere may leave the device's generator unusable.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, generator=generator).cuda()


def test_replay_equals_eager_and_results_stay(mlp: Mlp) -> None:
    adapter = adapter_over(mlp)
    kept: list[tuple[Tensor, Tensor]] = []
    for i in range(130):
        rows = random_rows(1 + 16 * (i % 4), i)
        kept.append((adapter({"rows": rows}), mlp({"rows": rows})))
    differences = [float((got - want).abs().max()) for got, want in kept]
    print(f"\nlargest difference of {len(kept)} calls to eager: {max(differences)}")
    assert max(differences) <= 1e-5
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.warmup_misses, stats.graph_hits) == (4, 4, 126)
    assert len({got.data_ptr() for got, _ in kept}) == len(kept)


def test_optional_inputs_strides_and_scalars(mlp: Mlp) -> None:
    def forward(inputs: Inputs) -> Tensor:
        scale = inputs["scale"]
        assert scale is not None
        return mlp(inputs) * scale

    adapter = adapter_over(forward)
    for i in range(6):
        wide = random_rows(16, i).repeat(1, 2)
        inputs: Inputs = {
            "rows": wide[:, ::2],
            "bias": None if i % 2 else random_rows(1, 100 + i),
            "scale": torch.tensor(float(i), device="cuda"),
        }
        assert torch.allclose(adapter(inputs), forward(inputs), atol=1e-5)
    assert adapter.get_cumulative_stats().num_graphs == 2


def test_the_capturing_call_waits_for_its_inputs(mlp: Mlp) -> None:
    """Inputs that the current stream has yet to compute, on the capturing call and on replays."""
    adapter = adapter_over(mlp)
    for i in range(4):
        want_rows = random_rows(32, i)
        rows = torch.zeros_like(want_rows)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        rows.copy_(want_rows)
        assert torch.allclose(adapter({"rows": rows}), mlp({"rows": want_rows}), atol=1e-5)


def test_modes_may_change_between_calls(mlp: Mlp) -> None:
    adapter = adapter_over(mlp)
    rows = random_rows(8, 0)
    want = mlp({"rows": rows})
    for i in range(6):
        with torch.inference_mode(i % 2 == 0), torch.no_grad():
            assert torch.allclose(adapter({"rows": rows}), want, atol=1e-5)
    assert adapter.get_cumulative_stats().graph_hits == 5


def test_ineligible_calls_run_eagerly(mlp: Mlp) -> None:
    adapter = adapter_over(mlp)
    rows = random_rows(8, 0)
    for _ in range(3):
        adapter({"rows": rows})
    with torch.inference_mode(False), torch.enable_grad():
        adapter({"rows": rows.clone()})
    with torch.autocast("cuda", dtype=torch.bfloat16):
        adapter({"rows": rows})
    graph, outer = torch.cuda.CUDAGraph(), torch.zeros_like(rows)
    with torch.cuda.graph(graph):
        outer.copy_(adapter({"rows": rows}))
    graph.replay()
    assert torch.allclose(outer, mlp({"rows": rows}), atol=1e-5)
    mixed = GraphAdapter(lambda inputs: rows, GraphSettings(), torch.device("cuda"))
    for inputs in ({"rows": rows.cpu()}, {"rows": rows, "bias": rows.cpu()}, {"rows": None}):
        mixed(inputs)
    assert adapter.get_cumulative_stats().ineligible_misses == 3
    assert mixed.get_cumulative_stats().ineligible_misses == 3


def test_two_replay_streams_are_isolated(mlp: Mlp) -> None:
    """One adapter, one shape, calls alternating between busy streams without a host wait."""
    adapter = adapter_over(mlp)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    rows = [random_rows(64, i) for i in range(60)]
    want = [mlp({"rows": each}) for each in rows]
    torch.cuda.synchronize()
    got = []
    for i, each in enumerate(rows):
        with torch.cuda.stream(streams[i % 2]):
            got.append(adapter({"rows": each}))
    torch.cuda.synchronize()
    assert all(torch.allclose(g, w, atol=1e-5) for g, w in zip(got, want, strict=True))
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.graph_hits) == (2, 58)
    assert len(adapter._shared_pools) == 2
    pools = list(adapter._shared_pools.values())
    assert pools[0].stream != pools[1].stream


def test_late_captures_while_other_threads_replay(mlp: Mlp) -> None:
    """Threads with an adapter and a stream each; every one captures now and then, until the end."""
    num_threads, num_calls = 4, 200
    adapters = [adapter_over(mlp, max_graphs=20) for _ in range(num_threads)]
    streams = [torch.cuda.Stream() for _ in range(num_threads)]
    rows = [[random_rows(1 + i // 10, 1000 * t + i) for i in range(num_calls)] for t in range(num_threads)]
    want = [[mlp({"rows": each}) for each in of_thread] for of_thread in rows]
    got: list[list[Tensor]] = [[] for _ in range(num_threads)]
    errors: list[BaseException] = []
    torch.cuda.synchronize()

    def caller(t: int) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(streams[t]):
                for each in rows[t]:
                    got[t].append(adapters[t]({"rows": each}))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(t,)) for t in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for t in range(num_threads):
        assert all(torch.allclose(g, w, atol=1e-5) for g, w in zip(got[t], want[t], strict=True))
        stats = adapters[t].get_cumulative_stats()
        assert (stats.num_graphs, stats.warmup_misses, stats.graph_hits) == (20, 20, 180)


def test_memory_floor_skips_and_later_admits(mlp: Mlp) -> None:
    torch.cuda.empty_cache()
    floor = torch.cuda.mem_get_info()[0] - 1024 * MIB
    adapter = adapter_over(mlp, min_free_bytes=floor)
    rows = random_rows(8, 0)
    for _ in range(2):
        adapter({"rows": rows})
    ballast = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
    more = random_rows(16, 1)
    for _ in range(4):
        assert torch.allclose(adapter({"rows": more}), mlp({"rows": more}), atol=1e-5)
    adapter({"rows": rows})
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.memory_misses, stats.graph_hits) == (1, 3, 2)
    del ballast
    torch.cuda.empty_cache()
    adapter({"rows": more})
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.memory_misses) == (2, 3)


def test_shared_pools_take_less_memory(mlp: Mlp) -> None:
    sizes = [16384, 12288, 8192, 4096]
    pool_bytes = {}
    for share in (True, False):
        adapter = adapter_over(mlp, share_pools=share)
        for num_rows in sizes:
            rows = random_rows(num_rows, num_rows)
            for _ in range(3):
                output = adapter({"rows": rows})
            assert torch.allclose(output, mlp({"rows": rows}), atol=1e-5)
        pool_bytes[share] = adapter.pool_bytes
        assert adapter.static_bytes == 2 * 4 * WIDTH * sum(sizes)
        del adapter
        torch.cuda.empty_cache()
    print(f"\npool MiB: shared {pool_bytes[True] / MIB:.1f}, private {pool_bytes[False] / MIB:.1f}")
    assert 0 < pool_bytes[True] < pool_bytes[False]


def test_no_growth_after_the_last_capture(mlp: Mlp) -> None:
    adapter = adapter_over(mlp)
    rows = [random_rows(n, n) for n in (1, 8, 64, 512, 3, 5, 7, 9, 11)]  # four captured, five eager
    for i in range(200):
        adapter({"rows": rows[i % len(rows)]})
    torch.cuda.synchronize()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])
    for i in range(2000):
        adapter({"rows": rows[i % len(rows)]})
    torch.cuda.synchronize()
    after = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])
    print(f"\nallocated, reserved, free: {before} before and {after} after 2,000 calls")
    assert after[:2] == before[:2]
    assert before[2] - after[2] < 2 * MIB  # the driver's own figure
    stats = adapter.get_cumulative_stats()
    assert (stats.num_graphs, stats.graph_hits + stats.graph_misses) == (4, 2200)
