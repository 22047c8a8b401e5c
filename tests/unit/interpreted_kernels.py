"""The Triton kernels against torch, on the CPU in Triton's interpreter; test_kernels.py runs this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from minicpmo_triton.encoders import kernels
from minicpmo_triton.encoders.audio import visible_ends
from minicpmo_triton.encoders.kernels import PLAIN, Tiles

#: In float32 the interpreter sums in another order than torch, no more.
FLOAT32 = 2e-6
#: Half a unit of bfloat16's last place, and some rounding inside.
BFLOAT16 = 4e-3
FLOAT16 = 5e-4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
@pytest.mark.parametrize("columns", [64, 72])
def test_add_norm(columns: int, dtype: torch.dtype, limit: float) -> None:
    norm = nn.LayerNorm(columns, eps=1e-3).requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    x, delta = torch.randn(2, 5, columns) + 3, torch.randn(2, 5, columns)
    want = x.to(dtype).float() + delta.to(dtype).float()
    total, normed = kernels.triton_add_norm(x.to(dtype), delta.to(dtype), norm)
    assert total.dtype == normed.dtype == dtype
    assert error(total, want) < limit
    assert error(normed, norm(want)) < limit


@pytest.mark.parametrize("width", [588, 592])
def test_scale_patches(width: int) -> None:
    patches = torch.randint(0, 256, (2, 3, 588), dtype=torch.uint8)
    got = kernels.triton_scale_patches(patches, width, torch.float32)
    assert torch.allclose(got, kernels.scale_patches(patches, width, torch.float32, PLAIN), atol=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", [1, 6, 7])
def test_windows(stride: int, length: int) -> None:
    x = torch.randn(2, length, 24)
    got = kernels.triton_windows(x, stride, torch.float32)
    assert torch.equal(got, kernels.windows(x, stride, torch.float32, PLAIN))


def attention(qkv: Tensor, heads: int, visible_end: Tensor | None) -> Tensor:
    mask = None if visible_end is None else kernels.additive_mask(visible_end, torch.float32)
    return kernels.attend(qkv.float(), heads, mask, PLAIN)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
@pytest.mark.parametrize("length", [5, 64, 75])
@pytest.mark.parametrize("block", [None, 10, 50])
def test_attention(head_dim: int, length: int, block: int | None) -> None:
    qkv = torch.randn(2, length, 3 * 2 * head_dim)
    ends = None if block is None else visible_ends(length, block)
    got = kernels.triton_attend(qkv, 2, ends, Tiles(32, 16, 4, 2))
    assert error(got, attention(qkv, 2, ends)) < FLOAT32


def test_attention_takes_any_ends() -> None:
    """They are an input of the graph, not a rule of the kernel."""
    qkv = torch.randn(1, 70, 3 * 2 * 16)
    ends = torch.randint(1, 71, (70,), dtype=torch.int32)
    got = kernels.triton_attend(qkv, 2, ends, Tiles(32, 16, 4, 2))
    assert error(got, attention(qkv, 2, ends)) < FLOAT32


def test_large_scores_do_not_overflow() -> None:
    qkv = 6 * torch.randn(1, 40, 3 * 64)  # scores of some hundreds, whose rounding the exponential magnifies
    got = kernels.triton_attend(qkv, 1, None, Tiles(16, 16, 4, 2))
    assert error(got, attention(qkv, 1, None)) < 100 * FLOAT32


def test_attention_in_half_precision() -> None:
    """float16: the interpreter cannot multiply matrices of bfloat16."""
    qkv = torch.randn(1, 75, 3 * 2 * 72).half()
    ends = visible_ends(75, 50)
    got = kernels.triton_attend(qkv, 2, ends, Tiles(32, 16, 4, 2))
    assert got.dtype == torch.float16
    assert error(got, attention(qkv, 2, ends)) < FLOAT16
