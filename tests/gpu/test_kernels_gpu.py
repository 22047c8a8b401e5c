"""The fast kernels at the encoders' full size: right in bfloat16, in graphs, and no worse than torch's."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicpmo_triton.encoders import kernels
from minicpmo_triton.encoders.audio import num_positions, visible_ends
from minicpmo_triton.encoders.kernels import PLAIN, KernelChoice, Tiles
from minicpmo_triton.encoders.random_weights import random_audio_module, random_vision_module
from minicpmo_triton.encoders.resampler import sincos_table
from minicpmo_triton.encoders.vision import MAX_SLICE_PATCHES, resampler_positions, tower_positions

pytest.importorskip("triton", reason="Triton (the language) is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Half a unit of bfloat16's last place is 2e-3 of a value; the norm of the error is under this.
ROUNDING = 4e-3
#: How much more than torch's own bfloat16 module a choice may differ from float32.
ALLOWANCE = 1.1  # two roundings of one computation differ by some percent

EVERYTHING = KernelChoice(add_norm=True, fused_gelu=True, attention="triton", stem=True)
DEFAULT = {"vision": kernels.VISION_KERNELS, "audio": kernels.AUDIO_KERNELS}
CHOICES = pytest.mark.parametrize("everything", [True, False], ids=["everything", "default"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture(autouse=True)
def full_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("shape", [(1, 1024, 1152), (8, 1035, 1152), (1, 50, 1024), (3, 1499, 1024)])
def test_add_norm(shape: tuple[int, ...]) -> None:
    norm = nn.LayerNorm(shape[-1], eps=1e-6, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    x, delta = 3 * randn(*shape), randn(*shape)
    total, normed = kernels.add_norm(x, delta, norm, EVERYTHING)
    want = x.float() + delta.float()
    assert error(total, want) < ROUNDING
    assert error(normed, F.layer_norm(want, shape[-1:], eps=1e-6)) < ROUNDING


@pytest.mark.parametrize("tiles", [Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2)], ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "block"),
    [
        *((1, 1024, 72, None), (8, 1035, 72, None), (2, 5, 72, None)),
        *((1, 50, 64, 50), (1, 1500, 64, 50), (3, 777, 64, 50)),
    ],
)
def test_attention(batch: int, length: int, head_dim: int, block: int | None, tiles: Tiles) -> None:
    qkv = randn(batch, length, 3 * 16 * head_dim)
    ends = None if block is None else visible_ends(length, block).cuda()
    mask = None if ends is None else kernels.additive_mask(ends, torch.float32)
    got = kernels.triton_attend(qkv, 16, ends, tiles)
    # The softmax's weights are rounded to bfloat16 as well.
    assert error(got, kernels.attend(qkv.float(), 16, mask, PLAIN)) < 1.5 * ROUNDING


@pytest.mark.parametrize("rows", [1, 50, 1024])
def test_linear_gelu(rows: int) -> None:
    x, weight, bias = randn(2, rows, 1152), randn(4304, 1152) * 1152**-0.5, randn(4304)
    got = kernels.linear_gelu(x, weight, bias, "tanh", EVERYTHING)
    want = F.gelu(F.linear(x.float(), weight.float(), bias.float()), approximate="tanh")
    assert error(got, want) < ROUNDING


@pytest.mark.parametrize("length", [1, 100, 2999])
def test_stems(length: int) -> None:
    mel = torch.randn(2, length, 80, device="cuda")
    for stride in (1, 2):
        want = kernels.windows(mel, stride, torch.bfloat16, PLAIN)
        assert torch.equal(kernels.windows(mel, stride, torch.bfloat16, EVERYTHING), want)
    patches = torch.randint(0, 256, (2, length, 588), dtype=torch.uint8, device="cuda")
    want = kernels.scale_patches(patches, 592, torch.bfloat16, PLAIN)
    assert error(kernels.scale_patches(patches, 592, torch.bfloat16, EVERYTHING), want) < 1e-4


@cache
def module(kind: str) -> nn.Module:
    return (random_vision_module if kind == "vision" else random_audio_module)(torch.bfloat16, "cuda")


def inputs(kind: str, which: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "audio":
        frames = (100, 3000, 1234)[which]
        mel = torch.randn(1, frames, 80, device="cuda", generator=generator)
        return mel, visible_ends(num_positions(frames), 50).cuda()
    batch, grid = ((1, (32, 32)), (2, (23, 45)), (1, (2, 5)))[which]
    shape = (batch, grid[0] * grid[1], 588)
    patches = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    positions = tower_positions(grid, 70).cuda().expand(batch, -1)
    return patches, positions, resampler_positions(grid).cuda().expand(batch, -1, -1)


@CHOICES
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_no_further_from_float32_than_torch(kind: str, which: int, everything: bool) -> None:
    encoder, choice = module(kind), EVERYTHING if everything else DEFAULT[kind]
    exact = copy.deepcopy(encoder).float()
    if kind == "vision":  # what was derived from the weights and rounded is derived anew
        exact.position_table = sincos_table(MAX_SLICE_PATCHES, exact.hidden_size // 2).cuda()
        exact.resampler.prepare()
    errors = {}
    with torch.inference_mode():
        want = exact(*inputs(kind, which))
        for name, candidate in (("plain", PLAIN), ("fast", choice)):
            assert encoder.use_kernels(candidate) is candidate
            errors[name] = error(encoder(*inputs(kind, which)), want)
    encoder.use_kernels(DEFAULT[kind])
    print(f"\n{kind} {which}: relative error to float32 {errors}")
    assert errors["fast"] <= ALLOWANCE * errors["plain"]


@CHOICES
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_a_graph_replays_what_runs_eagerly(kind: str, which: int, everything: bool) -> None:
    """Captured at once after load, so everything must be compiled by then."""
    encoder, choice = module(kind), EVERYTHING if everything else DEFAULT[kind]
    assert encoder.use_kernels(choice) is choice
    static = tuple(tensor.clone() for tensor in inputs(kind, which))
    with torch.inference_mode():
        encoder(*static)  # cuBLAS and cuDNN choose for these shapes
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            output = encoder(*static)
        for seed in (1, 2):
            fresh = list(inputs(kind, which, seed))
            if kind == "audio":
                fresh[1] = torch.clamp(fresh[1] - 7 * seed, min=1)  # another mask is another input
            for buffer, tensor in zip(static, fresh, strict=True):
                buffer.copy_(tensor)
            graph.replay()
            assert error(output, encoder(*fresh)) < 1e-2
    encoder.use_kernels(DEFAULT[kind])
