"""Steps of both encoders for which there is more than one way to compute them, and the choice.

Every function here has a plain torch form; it is the reference and what a CPU, and any type but
bfloat16, always runs. The others are for bfloat16 on a CUDA device and safe to capture: nothing is tuned
at a call, and one compilation serves all shapes of a model, so a run at load leaves none for later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

#: SDPA's kernels take a mask as it is only if its rows start at multiples of this many values.
MASK_ALIGNMENT = 16
#: A product's rows have to start at multiples of 16 bytes for its fast kernels.
ROW_ALIGNMENT = 8

Gelu: TypeAlias = Literal["none", "tanh"]  # torch's names of the erf form and the tanh form


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of one attention tile, warps of a program, tiles under way at once."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class KernelChoice:
    """How an encoder computes on CUDA in bfloat16. The default is torch's own operators."""

    #: Residual addition and layer norm in one pass.
    add_norm: bool = False
    #: The tanh form of GELU in the product before it, by cuBLASLt.
    fused_gelu: bool = False
    attention: Literal["torch", "triton"] = "torch"
    #: Reading the input: patches to pixels, or frames to convolution windows, in one pass.
    stem: bool = False
    attention_tiles: Tiles = Tiles(64, 64, 4, 3)


#: torch's own operators alone: the reference, and what runs where the others do not.
PLAIN = KernelChoice()
#: What wins on an H200 (docs/benchmarks.md): cuDNN's attention at head size 72, ours with a mask.
VISION_KERNELS = KernelChoice(add_norm=True, fused_gelu=True, stem=True)
AUDIO_KERNELS = KernelChoice(add_norm=True, attention="triton", stem=True)

#: Fastest first at these sizes. vLLM switches cuDNN's off for its whole process when it is imported.
_SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Switchable(nn.Module):
    """A module that computes as its ``kernels`` say."""

    kernels: KernelChoice = PLAIN


def use_kernels(module: nn.Module, choice: KernelChoice, trial: Callable[[], object]) -> KernelChoice:
    """Set the choice of every part of ``module``, and compile what it needs by ``trial``, a run of it.

    Returns the choice that holds: :data:`PLAIN` where the trial fails, as without Triton (the
    language) or without the C compiler that it needs.
    """
    for part in module.modules():
        if isinstance(part, Switchable):
            part.kernels = choice
    try:
        trial()
    except Exception as error:
        if choice == PLAIN:
            raise
        logger.warning("the encoder's fast kernels do not run here, torch's own do: %r", error)
        return use_kernels(module, PLAIN, trial)
    return choice


def runs_kernels(tensor: Tensor) -> bool:
    """Whether anything but the plain form may compute with weights or activations like ``tensor``."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


@contextmanager
def _on_device_of(tensor: Tensor) -> Iterator[None]:
    """Triton starts kernels on the current device."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:  # in Triton's interpreter, in tests
        yield


def add_norm(x: Tensor, delta: Tensor, norm: nn.LayerNorm, choice: KernelChoice) -> tuple[Tensor, Tensor]:
    """x + delta and its layer norm; both inputs [..., D]."""
    if not (choice.add_norm and runs_kernels(x)):
        total = x + delta
        return total, norm(total)
    return triton_add_norm(x, delta, norm)


def triton_add_norm(x: Tensor, delta: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    from minicpmo_triton.encoders.triton_kernels import add_norm_kernel

    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    columns = x.shape[-1]
    block = _power_of_two(columns)
    with _on_device_of(x):
        add_norm_kernel[(x.numel() // columns,)](
            x, delta, norm.weight, norm.bias, total, normed, norm.eps, columns, block, num_warps=4
        )
    return total, normed


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: Gelu, choice: KernelChoice) -> Tensor:
    """GELU of a linear layer: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    if choice.fused_gelu and approximate == "tanh" and runs_kernels(x):
        return cublas_linear_gelu(x, weight, bias)
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def cublas_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The tanh form, on CUDA only: on a CPU torch computes the erf form under this name."""
    rows = x.flatten(0, -2)
    output = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return output.view(*x.shape[:-1], len(weight))


def sdpa_order(tensor: Tensor) -> AbstractContextManager[None]:
    """While it lasts, torch's attention on ``tensor``'s device takes the fastest kernel that fits."""
    return sdpa_kernel(_SDPA_BACKENDS, set_priority=True) if tensor.is_cuda else nullcontext()


def additive_mask(visible_end: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, L, L] for SDPA of ``visible_end`` int32 [L]: query i sees the keys before visible_end[i]."""
    length = len(visible_end)
    width = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
    keys = torch.arange(width, device=visible_end.device)
    mask = torch.zeros(length, width, dtype=dtype, device=visible_end.device)
    mask.masked_fill_(keys >= visible_end[:, None], float("-inf"))
    return mask[None, None, :, :length]


def visibility(visible_end: Tensor, x: Tensor, choice: KernelChoice) -> Tensor:
    """What :func:`attend` takes for ``visible_end`` int32 [L]; made once for all layers."""
    if choice.attention == "triton" and runs_kernels(x):
        return visible_end
    return additive_mask(visible_end, x.dtype)


def attend(qkv: Tensor, heads: int, visible: Tensor | None, choice: KernelChoice) -> Tensor:
    """Attention of fused projections [B, L, 3 D] -> [B, L, D]; ``visible`` of :func:`visibility`."""
    if choice.attention == "triton" and runs_kernels(qkv):
        return triton_attend(qkv, heads, visible, choice.attention_tiles)
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)  # each [B, h, L, d]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)


def triton_attend(qkv: Tensor, heads: int, visible_end: Tensor | None, tiles: Tiles) -> Tensor:
    """``visible_end`` int32 [L], or ``None`` where every query sees every key."""
    from minicpmo_triton.encoders.triton_kernels import attention_kernel

    qkv = qkv.contiguous()
    batch, length, width = qkv.shape
    head_dim = width // (3 * heads)
    main = 1 << (head_dim.bit_length() - 1)
    rest = 0 if main == head_dim else max(16, _power_of_two(head_dim - main))
    out = qkv.new_empty(batch, length, heads * head_dim)
    with _on_device_of(qkv):
        attention_kernel[(-(-length // tiles.queries), heads, batch)](
            *(qkv, qkv if visible_end is None else visible_end, out),
            *(length, head_dim**-0.5 * math.log2(math.e)),
            *(heads, head_dim, main, rest, tiles.queries, tiles.keys, visible_end is not None),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


def scale_patches(patches: Tensor, width: int, dtype: torch.dtype, choice: KernelChoice) -> Tensor:
    """uint8 [..., P] -> pixels [..., width] in [-1, 1], zeros from column P on."""
    if not (choice.stem and patches.is_cuda and dtype == torch.bfloat16):
        # (x / 255 - 0.5) / 0.5, in float32 so that bfloat16 rounds once.
        pixels = (patches.to(torch.float32) * (2 / 255) - 1).to(dtype)
        return F.pad(pixels, (0, width - patches.shape[-1]))
    return triton_scale_patches(patches, width, dtype)


def triton_scale_patches(patches: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    from minicpmo_triton.encoders.triton_kernels import scale_patches_kernel

    patches = patches.contiguous()
    columns = patches.shape[-1]
    pixels = torch.empty(*patches.shape[:-1], width, dtype=dtype, device=patches.device)
    with _on_device_of(patches):
        scale_patches_kernel[(patches.numel() // columns,)](
            patches, pixels, columns, width, _power_of_two(width), num_warps=4
        )
    return pixels


def windows(x: Tensor, stride: int, dtype: torch.dtype, choice: KernelChoice) -> Tensor:
    """x [B, L, C] -> what a convolution of width 3 and padding 1 reads, [B, ceil(L / stride), 3 * C]."""
    if not (choice.stem and x.is_cuda and dtype == torch.bfloat16):
        return F.pad(x.to(dtype), (0, 0, 1, 1)).unfold(1, 3, stride).transpose(2, 3).flatten(2)
    return triton_windows(x, stride, dtype)


def triton_windows(x: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    from minicpmo_triton.encoders.triton_kernels import windows_kernel

    x = x.contiguous()
    batch, length, channels = x.shape
    out_length = -(-length // stride)
    out = torch.empty(batch, out_length, 3 * channels, dtype=dtype, device=x.device)
    with _on_device_of(x):
        windows_kernel[(out_length, batch)](
            x, out, length, out_length, channels, _power_of_two(channels), stride, num_warps=4
        )
    return out


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()
