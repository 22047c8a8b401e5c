"""Self-attention as both towers have it, with one fused projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
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

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, L, D], additive mask broadcast to [B, heads, L, L] -> [B, L, D]."""
        qkv = F.linear(x, self.get_buffer("qkv_weight"), self.get_buffer("qkv_bias"))
        q, k, v = qkv.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, h, L, d]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output


def fuse_attention(module: nn.Module) -> None:
    """Fuse the projections of every :class:`SelfAttention` in ``module``."""
    for part in list(module.modules()):
        if isinstance(part, SelfAttention):
            part.fuse()
