"""Both encoders written the ordinary way, to compare with: plain PyTorch modules, run eagerly.

Query, key and value are three projections; slices (or chunks) of all lengths are padded into one batch
with an attention mask; positions are worked out on the host in each call; convolutions are convolutions.
Attention goes through ``scaled_dot_product_attention``, and a mask that hides nothing is left out, as the
common model libraries do: the comparison should not win by an opponent's carelessness.

The functions are the same as those of :mod:`minicpmo_triton.encoders`, and so are the parameters' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from minicpmo_triton.encoders import audio, vision
from minicpmo_triton.encoders.resampler import HEAD_DIM, sincos_table
from minicpmo_triton.encoders.resampler import LAYER_NORM_EPS as RESAMPLER_EPS
from minicpmo_triton.encoders.vision import Grid, tower_positions
from minicpmo_triton.schema import PATCH_SIZE


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, key_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=key_bias)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, L, D], additive mask [B, 1, L, L] -> [B, L, D]."""
        q, k, v = (
            projection(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.out_proj(attended.transpose(1, 2).reshape(x.shape))
        return output


def hidden_keys(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Boolean [B, longest], true on padding; ``None`` where there is no padding."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    return torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that ``scaled_dot_product_attention`` adds to the scores."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, torch.finfo(dtype).min
    )


class VisionMlp(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return output


class VisionLayer(nn.Module):
    def __init__(self, config: vision.TowerConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.layer_norm1 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.self_attn = Attention(dim, config.num_attention_heads, key_bias=True)
        self.layer_norm2 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = VisionMlp(dim, config.intermediate_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        output: Tensor = x + self.mlp(self.layer_norm2(x))
        return output


class VisionEmbeddings(nn.Module):
    def __init__(self, config: vision.TowerConfig) -> None:
        super().__init__()
        dim, patch = config.hidden_size, config.patch_size
        self.grid_side = config.grid_side
        self.patch_embedding = nn.Conv2d(config.num_channels, dim, patch, patch)
        self.position_embedding = nn.Embedding(config.grid_side**2, dim)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        embedded = self.patch_embedding(pixels).flatten(2).transpose(1, 2)  # [B, N, D]
        position_ids = torch.zeros(embedded.shape[:2], dtype=torch.long)
        for row, grid in zip(position_ids, grids, strict=True):
            row[: grid[0] * grid[1]] = tower_positions(grid, self.grid_side)
        output: Tensor = embedded + self.position_embedding(position_ids.to(embedded.device))
        return output


class VisionTower(nn.Module):
    def __init__(self, config: vision.TowerConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid], hidden: Tensor | None) -> Tensor:
        x = self.embeddings(pixels, grids)
        mask = None
        if hidden is not None:
            mask = additive(hidden[:, None, None].expand(-1, 1, x.shape[1], -1), x.dtype)
        for layer in self.encoder.layers:  # type: ignore[union-attr]
            x = layer(x, mask)
        output: Tensor = self.post_layernorm(x)
        return output


class Resampler(nn.Module):
    def __init__(self, num_queries: int, dim: int, vision_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(num_queries, dim))
        self.proj = nn.Parameter(torch.empty(dim, dim))
        self.kv_proj = nn.Linear(vision_dim, dim, bias=False)
        self.attn = nn.MultiheadAttention(dim, dim // HEAD_DIM, batch_first=True)
        self.ln_q = nn.LayerNorm(dim, eps=RESAMPLER_EPS)
        self.ln_kv = nn.LayerNorm(dim, eps=RESAMPLER_EPS)
        self.ln_post = nn.LayerNorm(dim, eps=RESAMPLER_EPS)

    def lay_positions(self, side: int) -> None:
        """The positions of a grid of ``side`` x ``side``, beside the weights; smaller ones are its part."""
        table = sincos_table(side, self.proj.shape[0] // 2)
        columns, rows = (each.expand(side, side, -1) for each in (table[None], table[:, None]))
        self.register_buffer("positions", torch.cat((columns, rows), dim=-1).to(self.proj), persistent=False)

    def forward(self, features: Tensor, grids: Sequence[Grid], hidden: Tensor | None) -> Tensor:
        values = self.ln_kv(self.kv_proj(features))
        table = self.get_buffer("positions")  # [side, side, D]
        positions = pad_sequence([table[:rows, :columns].flatten(0, 1) for rows, columns in grids], True)
        query = self.ln_q(self.query).repeat(len(values), 1, 1)
        attended, _ = self.attn(query, values + positions, values, hidden, need_weights=False)
        output: Tensor = self.ln_post(attended) @ self.proj
        return output


class OrdinaryVision(nn.Module):
    """Tower and resampler over one padded batch. Grids may have up to 70 rows and columns."""

    def __init__(self, config: vision.VisionConfig, tower: vision.TowerConfig) -> None:
        super().__init__()
        self.side = tower.grid_side
        self.vpm = VisionTower(tower)
        self.resampler = Resampler(config.query_num, config.hidden_size, tower.hidden_size)

    @classmethod
    def of(
        cls, weights: Mapping[str, Tensor], config: vision.VisionConfig, tower: vision.TowerConfig
    ) -> OrdinaryVision:
        """With ``weights`` under the checkpoint's names, which it does not copy."""
        with torch.device("meta"):
            module = cls(config, tower)
        module.load_state_dict(weights, assign=True)
        module.resampler.lay_positions(tower.grid_side)
        return module.requires_grad_(False).eval()

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """pixels [B, 3, 14, 14 N], see :func:`pixel_batch`, of grids (rows, columns) -> [B, Q, H]."""
        if max(map(max, grids)) > self.side:
            raise ValueError(f"a grid has more than {self.side} rows or columns")
        hidden = hidden_keys([rows * columns for rows, columns in grids], pixels.device)
        output: Tensor = self.resampler(self.vpm(pixels, grids, hidden), grids, hidden)
        return output


class AudioLayer(nn.Module):
    def __init__(self, config: audio.TowerConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.self_attn = Attention(dim, config.encoder_attention_heads, key_bias=False)
        self.self_attn_layer_norm = nn.LayerNorm(dim, eps=audio.LAYER_NORM_EPS)
        self.fc1 = nn.Linear(dim, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim, eps=audio.LAYER_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        output: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return output


class AudioTower(nn.Module):
    def __init__(self, config: audio.TowerConfig, block_positions: int) -> None:
        super().__init__()
        dim = config.d_model
        self.block_positions = block_positions
        self.conv1 = nn.Conv1d(config.num_mel_bins, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, dim)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(dim, eps=audio.LAYER_NORM_EPS)

    def forward(self, mel: Tensor, num_frames: Sequence[int]) -> Tensor:
        x = F.gelu(self.conv1(mel))
        padding = hidden_keys(num_frames, mel.device)
        if padding is not None:  # the second convolution would read past a shorter chunk's end
            x = x.masked_fill(padding[:, None], 0.0)
        x = F.gelu(self.conv2(x)).transpose(1, 2)  # [B, L, D]
        position = torch.arange(x.shape[1], device=mel.device)
        mask = self._mask(position, [audio.num_positions(frames) for frames in num_frames], x.dtype)
        x = x + self.embed_positions(position)
        for layer in self.layers:
            x = layer(x, mask)
        output: Tensor = self.layer_norm(x)
        return output

    def _mask(self, position: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[B, 1, L, L]: a position sees its own block of one second and the earlier ones."""
        seen = (position // self.block_positions + 1) * self.block_positions
        hidden = position >= seen[:, None]
        padding = hidden_keys(lengths, position.device)
        if padding is None:
            return additive(hidden.expand(len(lengths), 1, -1, -1), dtype)
        return additive(hidden | padding[:, None, None], dtype)


class AudioProjection(nn.Module):
    def __init__(self, dim: int, hidden_size: int, pool_step: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(dim, hidden_size)
        self.linear2 = nn.Linear(hidden_size, hidden_size)
        self.pool = nn.AvgPool1d(pool_step, stride=pool_step)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear2(F.relu(self.linear1(x)))
        output: Tensor = self.pool(rows.transpose(1, 2)).transpose(1, 2)
        return output


class OrdinaryAudio(nn.Module):
    """Convolutions, tower, projection and pooling over one padded batch."""

    def __init__(self, config: audio.AudioConfig, tower: audio.TowerConfig) -> None:
        super().__init__()
        self.apm = AudioTower(tower, config.block_positions)
        self.audio_projection_layer = AudioProjection(
            tower.d_model, config.hidden_size, config.audio_pool_step
        )

    @classmethod
    def of(
        cls, weights: Mapping[str, Tensor], config: audio.AudioConfig, tower: audio.TowerConfig
    ) -> OrdinaryAudio:
        """With ``weights`` under the checkpoint's names, which it does not copy."""
        with torch.device("meta"):
            module = cls(config, tower)
        module.load_state_dict(weights, assign=True)
        return module.requires_grad_(False).eval()

    def forward(self, mel: Tensor, num_frames: Sequence[int]) -> Tensor:
        """mel [B, 80, F], see :func:`mel_batch`, of ``num_frames`` each -> [B, T, H].

        Of a shorter chunk only its own first rows mean something.
        """
        output: Tensor = self.audio_projection_layer(self.apm(mel, num_frames))
        return output


def pixel_batch(slices: Sequence[Tensor]) -> Tensor:
    """Slices of uint8 patches [N, 588] -> normalised pixels [B, 3, 14, 14 N], float32, zero-padded.

    All of a slice's patches stand side by side, as preprocessors of this model family hand them over.
    """
    padded = pad_sequence([((patches.float() / 255) - 0.5) / 0.5 for patches in slices], batch_first=True)
    side = PATCH_SIZE
    by_channel = padded.view(*padded.shape[:2], 3, side, side).permute(0, 2, 3, 1, 4)
    return by_channel.flatten(3).contiguous()


def mel_batch(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks of log-mel frames [F, 80] -> [B, 80, longest], zero-padded."""
    return pad_sequence(list(chunks), batch_first=True).transpose(1, 2).contiguous()
