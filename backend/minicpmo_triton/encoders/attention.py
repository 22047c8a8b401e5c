"""Self-attention as both towers have it, with one fused projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicpmo_triton.encoders.kernels import Switchable, attend


class SelfAttention(Switchable):
    """Multi-head self-attention, loaded under the checkpoint's names and then fused.

    :meth:`fuse` must run once the weights are there; it puts query, key and value into one matrix, so
    that a forward pass starts one product instead of three.
    """

    def __init__(self, dim: int, heads: int, key_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=key_bias)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def fuse(self) -> None:
        """Replace the three projections by ``qkv_weight`` and ``qkv_bias``."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weights = torch.cat([projection.weight.detach() for projection in projections])
        biases = [
            torch.zeros_like(self.q_proj.bias) if projection.bias is None else projection.bias.detach()
            for projection in projections
        ]
        del self.q_proj, self.k_proj, self.v_proj
        self.register_buffer("qkv_weight", weights)
        self.register_buffer("qkv_bias", torch.cat(biases))

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """x [B, L, D] -> [B, L, D]; ``visible`` of :func:`~minicpmo_triton.encoders.kernels.visibility`."""
        qkv = F.linear(x, self.get_buffer("qkv_weight"), self.get_buffer("qkv_bias"))
        output: Tensor = self.out_proj(attend(qkv, self.heads, visible, self.kernels))
        return output


def fuse_attention(module: nn.Module) -> None:
    """Fuse the projections of every :class:`SelfAttention` in ``module``."""
    for part in list(module.modules()):
        if isinstance(part, SelfAttention):
            part.fuse()
