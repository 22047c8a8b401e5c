"""The audio encoder: Whisper's encoder, projection and pooling, from log-mel frames to embedding rows.

Stateless: each chunk of at most 30 s is computed by itself. Attention is causal in blocks of one second.
The forward pass is safe to capture in a CUDA graph; see :mod:`minicpmo_triton.encoders.vision`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders.attention import SelfAttention, fuse_attention
from minicpmo_triton.errors import CheckpointError
from minicpmo_triton.schema import MAX_MEL_FRAMES, MEL_BINS

LAYER_NORM_EPS = 1e-5
POSITIONS_PER_SECOND = 50
#: SDPA's kernels take a mask as it is only if its rows start at multiples of this many values.
MASK_ALIGNMENT = 16


@dataclass(frozen=True)
class TowerConfig:
    """``audio_config`` of config.json; the defaults are Whisper's."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    num_mel_bins: int
    max_source_positions: int = 1500
    activation_function: str = "gelu"


@dataclass(frozen=True)
class AudioConfig:
    """Top-level fields of config.json that the audio encoder depends on."""

    hidden_size: int
    audio_pool_step: int
    audio_chunk_length: float

    @property
    def block_positions(self) -> int:
        """Positions that see one another: those of ``audio_chunk_length`` seconds."""
        return int(self.audio_chunk_length * POSITIONS_PER_SECOND)


def read_audio_config(checkpoint: Checkpoint) -> tuple[AudioConfig, TowerConfig]:
    """Both configs, or :class:`CheckpointError` naming what is missing or not as this code computes it."""
    config = checkpoint.section("", AudioConfig)
    tower = checkpoint.section("audio_config", TowerConfig)
    checks = {
        "audio_pool_step must be at least 1": config.audio_pool_step >= 1,
        "audio_chunk_length must cover at least one position": config.block_positions >= 1,
        f"audio_config.num_mel_bins must be {MEL_BINS}": tower.num_mel_bins == MEL_BINS,
        f"audio_config.max_source_positions must be {num_positions(MAX_MEL_FRAMES)}": (
            tower.max_source_positions == num_positions(MAX_MEL_FRAMES)
        ),
        "audio_config.activation_function must be gelu": tower.activation_function == "gelu",
        "audio_config.d_model must be a multiple of encoder_attention_heads": (
            tower.d_model % tower.encoder_attention_heads == 0
        ),
    }
    if problems := [rule for rule, holds in checks.items() if not holds]:
        raise CheckpointError(f"{checkpoint.path}: unsupported config.json: {'; '.join(problems)}")
    return config, tower


def num_positions(num_frames: int) -> int:
    """Positions that the second convolution (stride 2, padding 1) leaves of ``num_frames``."""
    return (num_frames + 1) // 2


def num_tokens(num_frames: int, pool_step: int) -> int:
    """Embedding rows of a chunk of ``num_frames``; a last window that is not full gives none."""
    return num_positions(num_frames) // pool_step


def block_causal_mask(length: int, block: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, length, length rounded up to :data:`MASK_ALIGNMENT`] on the CPU.

    Position i sees the positions before ``(i // block + 1) * block``: its own block and all earlier
    ones. The mask of a shorter chunk is its upper left part.
    """
    width = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
    query, key = torch.arange(length)[:, None], torch.arange(width)[None]
    mask = torch.zeros(length, width, dtype=dtype)
    mask.masked_fill_(key >= (query // block + 1) * block, float("-inf"))
    return mask[None, None]


def _convolve(x: Tensor, convolution: nn.Conv1d, stride: int) -> Tensor:
    """x [B, L, C] -> [B, ceil(L / stride), D]: the convolution (width 3, padding 1) as one product.

    cuDNN would look for a plan at each length it has not met; a product has no such cost, and
    needs no transposition.
    """
    windows = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride).flatten(2)  # [B, L, C * 3]
    return F.gelu(F.linear(windows, convolution.weight.flatten(1), convolution.bias))


class AudioLayer(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.self_attn = SelfAttention(dim, config.encoder_attention_heads, key_bias=False)
        self.self_attn_layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.fc1 = nn.Linear(dim, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        output: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return output


class AudioTower(nn.Module):
    """Whisper's encoder."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, dim)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)

    def forward(self, mel: Tensor, mask: Tensor) -> Tensor:
        """mel [B, F, 80] in the weights' type, mask [1, 1, L, L or more] -> [B, L, D]."""
        x = _convolve(_convolve(mel, self.conv1, stride=1), self.conv2, stride=2)
        length = x.shape[1]
        x = x + self.embed_positions.weight[:length]
        for layer in self.layers:
            x = layer(x, mask[..., :length])
        output: Tensor = self.layer_norm(x)
        return output


class AudioProjection(nn.Module):
    """Two linear layers to the language model's hidden size, averaged over ``pool_step`` positions."""

    def __init__(self, dim: int, hidden_size: int, pool_step: int) -> None:
        super().__init__()
        self.pool_step = pool_step
        self.linear1 = nn.Linear(dim, hidden_size)
        self.linear2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, D] -> [B, L // pool_step, H]."""
        tokens = x.shape[1] // self.pool_step
        inner = F.relu(self.linear1(x[:, : tokens * self.pool_step]))
        windows = inner.view(len(x), tokens, self.pool_step, -1)
        # The reference averages after linear2; that is linear, so the average may come first and leaves
        # a fifth of the work.
        output: Tensor = self.linear2(windows.mean(2))
        return output


class AudioModule(nn.Module):
    """Convolutions, tower, projection and pooling. After the weights are in place, call :meth:`prepare`."""

    def __init__(self, config: AudioConfig, tower: TowerConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.pool_step = config.audio_pool_step
        self.block_positions = config.block_positions
        self.max_positions = tower.max_source_positions
        self.apm = AudioTower(tower)
        self.audio_projection_layer = AudioProjection(
            tower.d_model, config.hidden_size, config.audio_pool_step
        )

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> AudioModule:
        """The module with the checkpoint's weights, ready to run; :class:`CheckpointError` otherwise."""
        config, tower = read_audio_config(checkpoint)
        with torch.device("meta"):
            module = cls(config, tower)
        checkpoint.load_module(module.apm, "apm.", dtype, device)
        checkpoint.load_module(module.audio_projection_layer, "audio_projection_layer.", dtype, device)
        return module.prepare()

    def prepare(self) -> AudioModule:
        """Fuse the projections."""
        fuse_attention(self)
        return self.requires_grad_(False).eval()

    def forward(self, mel: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode chunks of F frames.

        mel float32 [B, F, 80]; attention_mask additive [1, 1, L, L rounded up], see
        :class:`BlockCausalMask`, with L of :func:`num_positions`. Returns [B, T, hidden_size] with T
        of :func:`num_tokens`, in the weights' type.
        """
        features = self.apm(mel.to(self.apm.conv1.weight.dtype), attention_mask)
        output: Tensor = self.audio_projection_layer(features)
        return output


class BlockCausalMask:
    """The mask of the longest chunk on the device; every shorter chunk's mask is a view of it."""

    def __init__(self, max_positions: int, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._longest = block_causal_mask(max_positions, block, dtype).to(device)

    def of(self, length: int) -> Tensor:
        """[1, 1, length, length rounded up to :data:`MASK_ALIGNMENT`]; do not write to it."""
        width = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
        return self._longest[:, :, :length, :width]
