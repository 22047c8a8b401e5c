"""Each way of computing a step of the encoders, side by side in CUDA graphs, and what each brings.

    python -m benchmarks.kernel_choices [--seconds 85]

Needs one NVIDIA GPU; random weights at MiniCPM-o 4.5's dimensions. Prints tables (times in
microseconds for steps, in milliseconds for whole encoders) and one JSON line. Attention's tiles that
win at a shape are those of the whole encoders' runs at that shape.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from minicpmo_triton.encoders import kernels
from minicpmo_triton.encoders.audio import AudioModule, num_positions, visible_ends
from minicpmo_triton.encoders.kernels import PLAIN, KernelChoice, Tiles
from minicpmo_triton.encoders.random_weights import random_audio_module, random_vision_module
from minicpmo_triton.encoders.resampler import sincos_table
from minicpmo_triton.encoders.vision import (
    MAX_SLICE_PATCHES,
    VisionModule,
    resampler_positions,
    tower_positions,
)

Step = Callable[[], Any]

ATTENTION_TILES = (
    *(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2)),
    *(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2)),
)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def captured_seconds(step: Step, calls: int, replays: int = 9) -> float:
    """Median time of one call of ``step`` among ``calls`` in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                output = step()
    torch.cuda.current_stream().wait_stream(stream)
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / calls)
    del output
    return statistics.median(times[2:])


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale


class Table:
    """Results by name; a candidate that cannot run says so and costs nothing else."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, float | str]] = {}

    def measure(self, title: str, candidates: dict[str, Step], calls: int = 20) -> dict[str, float]:
        """Microseconds of each candidate; printed as they come."""
        row: dict[str, float | str] = {}
        for name, step in candidates.items():
            try:
                row[name] = round(captured_seconds(step, calls) * 1e6, 1)
            except Exception as error:  # a kernel that does not take this shape
                row[name] = type(error).__name__
                torch.cuda.synchronize()
        self.results[title] = row
        print(f"{title:34s}", "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        return {name: value for name, value in row.items() if isinstance(value, float)}


def compile_all(steps: list[Step]) -> None:
    """Triton compiles while others of its threads do."""

    def run(step: Step) -> None:
        try:
            with torch.inference_mode():
                step()
        except Exception as error:
            print("does not compile:", str(error)[:200])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, steps))
    torch.cuda.synchronize()


def sdpa(batch: int, length: int, head_dim: int, backend: str, mask: Tensor | None = None) -> Step:
    qkv = randn(batch, length, 3 * 16 * head_dim)

    def step() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return kernels.attend(qkv, 16, mask, PLAIN)

    return step


def triton_attention(batch: int, length: int, head_dim: int, ends: Tensor | None) -> dict[str, Step]:
    qkv = randn(batch, length, 3 * 16 * head_dim)
    return {
        f"{t.queries}x{t.keys}w{t.num_warps}s{t.num_stages}": partial(kernels.triton_attend, qkv, 16, ends, t)
        for t in ATTENTION_TILES
    }


def attention_tables(table: Table) -> dict[tuple[str, int], Tiles]:
    """The best tiles of each (encoder, batch of 1024 patches or positions)."""
    names = dict(zip(triton_attention(1, 16, 64, None), ATTENTION_TILES, strict=True))
    ends = visible_ends(1500, 50).cuda()
    compile_all(
        [*triton_attention(1, 64, 72, None).values(), *triton_attention(1, 64, 64, ends[:64]).values()]
    )
    best = {}
    for batch in (1, 2, 8):
        triton = triton_attention(batch, 1024, 72, None)
        steps = {f"{name}": sdpa(batch, 1024, 72, name) for name in BACKENDS}
        times = table.measure(f"attention vision {batch}x1024 d72", steps | triton)
        best["vision", batch] = names[min(triton, key=lambda name: times.get(name, 1e9))]
        for head_dim in (80, 96, 128):
            steps = {name: sdpa(batch, 1024, head_dim, name) for name in ("cudnn", "flash")}
            table.measure(f"  padded to d{head_dim}", steps)
    for length in (50, 1500):
        mask = kernels.additive_mask(ends[:length], torch.bfloat16)
        triton = triton_attention(1, length, 64, ends[:length])
        steps = {f"{name}+mask": sdpa(1, length, 64, name, mask) for name in ("cudnn", "efficient")}
        steps["cudnn, no mask"] = sdpa(1, length, 64, "cudnn")
        times = table.measure(f"attention audio 1x{length} d64", steps | triton)
        best["audio", length] = names[min(triton, key=lambda name: times.get(name, 1e9))]
    return best


def elementwise_tables(table: Table) -> None:
    choice = KernelChoice(add_norm=True, stem=True)
    for rows, dim in ((1024, 1152), (8192, 1152), (50, 1024), (1500, 1024)):
        norm = nn.LayerNorm(dim, eps=1e-6, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        x, delta = randn(1, rows, dim), randn(1, rows, dim)
        steps: dict[str, Step] = {
            "torch": partial(kernels.add_norm, x, delta, norm, PLAIN),
            "triton": partial(kernels.add_norm, x, delta, norm, choice),
            "norm alone": partial(norm, x),
        }
        table.measure(f"add+norm {rows}x{dim}", steps)
    patches = torch.randint(0, 256, (1, 1024, 588), dtype=torch.uint8, device="cuda")
    steps = {}
    for name, width, how in (("torch", 592, PLAIN), ("torch, 588", 588, PLAIN), ("triton", 592, choice)):
        steps[name] = partial(embed_patches, patches, randn(1152, width), how)
    table.measure("patch embedding 1024", steps)
    for frames in (100, 3000):
        mel, inner = torch.randn(1, frames, 80, device="cuda"), randn(1, frames, 1024)
        steps = {"torch": partial(both_windows, mel, inner, PLAIN)}
        steps["triton"] = partial(both_windows, mel, inner, choice)
        table.measure(f"convolution windows {frames}", steps)


def embed_patches(patches: Tensor, weight: Tensor, choice: KernelChoice) -> Tensor:
    return F.linear(kernels.scale_patches(patches, weight.shape[1], torch.bfloat16, choice), weight)


def both_windows(mel: Tensor, inner: Tensor, choice: KernelChoice) -> None:
    kernels.windows(mel, 1, torch.bfloat16, choice)
    kernels.windows(inner, 2, torch.bfloat16, choice)


def feed_forward(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Tensor:
    return F.linear(kernels.cublas_linear_gelu(x, *up), *down)


def product_tables(table: Table) -> None:
    """fc1 with GELU each way, then the products with padded widths."""
    shapes = ((1024, 1152, 4304, "tanh"), (8192, 1152, 4304, "tanh"))
    shapes += ((50, 1024, 4096, "none"), (1500, 1024, 4096, "none"))
    for rows, depth, columns, form in shapes:
        x, weight, bias = randn(1, rows, depth), randn(columns, depth, scale=0.03), randn(columns)
        steps: dict[str, Step] = {
            "no gelu": partial(F.linear, x, weight, bias),
            "torch": partial(kernels.linear_gelu, x, weight, bias, form, PLAIN),
            "cublas tanh": partial(kernels.cublas_linear_gelu, x, weight, bias),
        }
        table.measure(f"fc1+gelu {rows}x{columns}x{depth}", steps)
    for rows in (1024, 8192):
        x, steps = randn(rows, 1152), {}
        for inner in (4304, 4352, 4608):
            up = randn(inner, 1152, scale=0.03), randn(inner)
            down = randn(1152, inner, scale=0.03), randn(1152)
            steps[str(inner)] = partial(feed_forward, x, up, down)
        table.measure(f"feed-forward width, {rows} rows", steps, calls=10)
        steps = {}
        for dim in (72, 80, 96, 128):
            steps[str(dim)] = partial(F.linear, x, randn(48 * dim, 1152), randn(48 * dim))
        table.measure(f"qkv by head dim, {rows} rows", steps, calls=10)


def vision_inputs(batch: int, grid: tuple[int, int] = (32, 32)) -> tuple[Tensor, Tensor, Tensor]:
    count = grid[0] * grid[1]
    patches = torch.randint(0, 256, (batch, count, 588), dtype=torch.uint8, device="cuda")
    positions = tower_positions(grid, 70).cuda().expand(batch, -1).contiguous()
    return patches, positions, resampler_positions(grid).cuda().expand(batch, -1, -1).contiguous()


def audio_inputs(num_frames: int) -> tuple[Tensor, Tensor]:
    mel = torch.randn(1, num_frames, 80, device="cuda")
    return mel, visible_ends(1500, 50).cuda()[: num_positions(num_frames)]


def reference(module: Any) -> Any:
    """The same weights in float32, what is derived from them made anew."""
    module = copy.deepcopy(module).float()
    if isinstance(module, VisionModule):
        module.position_table = sincos_table(MAX_SLICE_PATCHES, module.hidden_size // 2).cuda()
        module.resampler.prepare()
    return module


def choices(tiles: Tiles, vision: bool) -> Iterator[tuple[str, KernelChoice]]:
    yield "plain", PLAIN
    yield "add_norm", KernelChoice(add_norm=True)
    yield "stem", KernelChoice(stem=True)
    yield "attention triton", KernelChoice(attention="triton", attention_tiles=tiles)
    if vision:
        yield "gelu in the product", KernelChoice(fused_gelu=True)
    fast = KernelChoice(add_norm=True, stem=True, fused_gelu=vision)
    yield "all but attention", fast
    yield "all", replace(fast, attention="triton", attention_tiles=tiles)


def module_table(
    table: Table, title: str, module: VisionModule | AudioModule, tiles: Tiles, inputs: tuple[Tensor, ...]
) -> None:
    """Milliseconds of each choice and its error against float32."""
    expected = reference(module)(*inputs).double() if inputs[0].shape[0] == 1 else None
    row: dict[str, float | str] = {}
    print(f"{title}:  choice, ms, relative error to float32")
    for name, choice in choices(tiles, isinstance(module, VisionModule)):
        try:
            if module.use_kernels(choice) is not choice:
                raise RuntimeError("fell back to plain; the log says why")
            row[name] = round(captured_seconds(partial(module, *inputs), 1, 15) * 1e3, 3)
            error = ""
            if expected is not None:
                difference = (module(*inputs).double() - expected).norm() / expected.norm()
                row[f"{name} error"] = round(float(difference), 6)
                error = f"{float(difference):.5f}"
            print(f"  {name:28s} {row[name]:8} {error}", flush=True)
        except Exception as problem:
            row[name] = repr(problem)[:300]
            print(f"  {name:28s} {row[name]}", flush=True)
            torch.cuda.synchronize()
    module.use_kernels(PLAIN)
    table.results[title] = row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=85, help="skip what would start after this time")
    deadline = time.monotonic() + parser.parse_args().seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    table = Table()
    with torch.inference_mode():
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        tiles = attention_tables(table)
        audio, vision = (
            random_audio_module(torch.bfloat16, "cuda"),
            random_vision_module(torch.bfloat16, "cuda"),
        )
        parts: dict[str, Step] = {}
        for frames, length in ((3000, 1500), (100, 50)):
            name, inputs = f"audio {frames // 100} s", audio_inputs(frames)
            parts[name] = partial(module_table, table, name, audio, tiles["audio", length], inputs)
        parts["steps"] = partial(elementwise_tables, table)
        for batch in (1, 8, 2):
            name, inputs = f"vision {batch} slices", vision_inputs(batch)
            parts[name] = partial(module_table, table, name, vision, tiles["vision", batch], inputs)
        parts["products"] = partial(product_tables, table)
        for name, part in parts.items():
            if time.monotonic() > deadline:
                print(f"no time left for: {name}")
                continue
            part()
            print(f"[{time.monotonic() - deadline:+.0f} s]", flush=True)
    result = {
        "benchmark": "kernel_choices",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tiles": {f"{kind} {size}": str(best) for (kind, size), best in tiles.items()},
        "results": table.results,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
