"""The resampler: a fixed set of learned queries reads one slice's patches through one attention.

Keys carry a 2-D sine-cosine position of the patch in its grid: one half of the channels encodes the
column, the other the row, each with the 1-D table of "Attention Is All You Need" (sines, then cosines).
Both halves come from one 1-D table, so the position of any grid is two look-ups and nothing needs
to know the largest grid in advance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 128
LAYER_NORM_EPS = 1e-6


def sincos_table(length: int, dim: int) -> Tensor:
    """[length, dim] float32 on the CPU: sines of position times frequency, then the cosines."""
    frequency = 1.0 / 10000 ** (torch.arange(dim // 2, dtype=torch.float32) / (dim / 2))
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return torch.cat((angle.sin(), angle.cos()), dim=1)


class PackedAttention(nn.Module):
    """The weights of ``nn.MultiheadAttention`` under its names: query, key and value in one matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def project_query(self, query: Tensor) -> Tensor:
        """query [Q, D] -> [heads, Q, d]."""
        return self._heads_apart(
            F.linear(query, self.in_proj_weight.chunk(3)[0], self.in_proj_bias.chunk(3)[0])
        )

    def forward(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q of :meth:`project_query`, the same for every slice; key and value [B, N, D] -> [B, Q, D]."""
        weights, biases = self.in_proj_weight.chunk(3)[1:], self.in_proj_bias.chunk(3)[1:]
        k, v = (  # [B, h, N, d]
            self._heads_apart(F.linear(inputs, weight, bias))
            for inputs, weight, bias in zip((key, value), weights, biases, strict=True)
        )
        attended = F.scaled_dot_product_attention(q.expand(len(k), -1, -1, -1), k, v)
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads_apart(self, x: Tensor) -> Tensor:
        """[..., L, D] -> [..., heads, L, D / heads]."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-3, -2)


class Resampler(nn.Module):
    """Patch features of a slice to ``num_queries`` rows of the language model's hidden size."""

    def __init__(self, num_queries: int, dim: int, vision_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(num_queries, dim))
        self.proj = nn.Parameter(torch.empty(dim, dim))
        self.kv_proj = nn.Linear(vision_dim, dim, bias=False)
        self.attn = PackedAttention(dim)
        self.ln_q = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.ln_kv = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.ln_post = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)

    def prepare(self) -> None:
        """Project the queries, which depend on nothing but the weights."""
        with torch.no_grad():
            q = self.attn.project_query(self.ln_q(self.query))
        self.register_buffer("projected_query", q, persistent=False)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """features [B, N, vision dim], positions [B, N, D] -> [B, num_queries, D]."""
        values = self.ln_kv(self.kv_proj(features))
        attended = self.attn(self.get_buffer("projected_query"), values + positions, values)
        output: Tensor = self.ln_post(attended) @ self.proj
        return output
