"""The audio encoder: Whisper's encoder, projection and pooling, from log-mel frames to embedding rows.

Stateless: each chunk of at most 30 s is computed by itself. Attention is causal in blocks of one second.
The forward pass is safe to capture in a CUDA graph; see :mod:`minicpmo_triton.encoders.vision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders.attention import SelfAttention, fuse_attention
from minicpmo_triton.encoders.kernels import (
    AUDIO_KERNELS,
    KernelChoice,
    Switchable,
    add_norm,
    linear_gelu,
    runs_kernels,
    sdpa_order,
    use_kernels,
    visibility,
    windows,
)
from minicpmo_triton.errors import CheckpointError
from minicpmo_triton.schema import MAX_MEL_FRAMES, MEL_BINS

LAYER_NORM_EPS = 1e-5
POSITIONS_PER_SECOND = 50


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


def visible_ends(length: int, block: int) -> Tensor:
    """int32 [length] on the CPU: position i sees those before ``(i // block + 1) * block``.

    Those are its own block's and all earlier ones'. An end may lie beyond ``length``, so the ends of a
    shorter chunk are the first of a longer one's.
    """
    return (torch.arange(length, dtype=torch.int32) // block + 1) * block


class Convolution(nn.Conv1d):
    """Width 3 and padding 1, as one product and in layout [B, L, C].

    cuDNN would look for a plan at each length it has not met; a product has no such cost, and
    needs no transposition.
    """

    def __init__(self, channels: int, dim: int, stride: int) -> None:
        super().__init__(channels, dim, 3, stride=stride, padding=1)

    def prepare(self) -> None:
        """Lay the weights out as the windows are."""
        weight = self.weight.detach().transpose(1, 2).flatten(1).contiguous()  # [D, 3 * C]
        self.register_buffer("windows_weight", weight, persistent=False)

    def embed(self, x: Tensor, choice: KernelChoice) -> Tensor:
        """x [B, L, C] of any type -> GELU of the convolution [B, ceil(L / stride), D]."""
        weight, bias = self.get_buffer("windows_weight"), self.bias
        assert bias is not None
        return linear_gelu(windows(x, self.stride[0], weight.dtype, choice), weight, bias, "none", choice)


class AudioLayer(Switchable):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.self_attn = SelfAttention(dim, config.encoder_attention_heads, key_bias=False)
        self.self_attn_layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.fc1 = nn.Linear(dim, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)

    def forward(
        self, x: Tensor, normed: Tensor, visible: Tensor, next_norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """x and its first layer norm -> this layer's output and ``next_norm`` of it, all [B, L, D]."""
        x, normed = add_norm(x, self.self_attn(normed, visible), self.final_layer_norm, self.kernels)
        inner = linear_gelu(normed, self.fc1.weight, self.fc1.bias, "none", self.kernels)
        return add_norm(x, self.fc2(inner), next_norm, self.kernels)


class AudioTower(Switchable):
    """Whisper's encoder."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.conv1 = Convolution(config.num_mel_bins, dim, stride=1)
        self.conv2 = Convolution(dim, dim, stride=2)
        self.embed_positions = nn.Embedding(config.max_source_positions, dim)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)

    def forward(self, mel: Tensor, visible_end: Tensor) -> Tensor:
        """mel float32 [B, F, 80], visible_end int32 [L] -> [B, L, D]."""
        x = self.conv2.embed(self.conv1.embed(mel, self.kernels), self.kernels)
        positions = self.embed_positions.weight[: x.shape[1]].expand_as(x)
        visible = visibility(visible_end, x, self.kernels)
        layers = cast(list[AudioLayer], list(self.layers))
        norms = [layer.self_attn_layer_norm for layer in layers]
        x, normed = add_norm(x, positions, norms[0], self.kernels)
        for layer, next_norm in zip(layers, [*norms[1:], self.layer_norm], strict=True):
            x, normed = layer(x, normed, visible, next_norm)
        output: Tensor = normed
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

    def prepare(self, kernels: KernelChoice = AUDIO_KERNELS) -> AudioModule:
        """Lay the weights out as the forward pass reads them, and compile its kernels."""
        fuse_attention(self)
        self.apm.conv1.prepare()
        self.apm.conv2.prepare()
        self.requires_grad_(False).eval()
        self.use_kernels(kernels)
        return self

    @torch.inference_mode()
    def use_kernels(self, choice: KernelChoice) -> KernelChoice:
        """Compute as ``choice`` says if it runs here, and compile it now: a capture must not."""
        return use_kernels(self, choice, self._try)

    def _try(self) -> None:
        weight = self.apm.conv1.weight
        for num_frames in (20, 400) if runs_kernels(weight) else ():  # few rows and many
            mel = torch.zeros(1, num_frames, MEL_BINS, device=weight.device)
            ends = visible_ends(num_positions(num_frames), self.block_positions)
            self.forward(mel, ends.to(weight.device))

    def forward(self, mel: Tensor, visible_end: Tensor) -> Tensor:
        """Encode chunks of F frames.

        mel float32 [B, F, 80]; visible_end int32 [L], see :func:`visible_ends`, with L of
        :func:`num_positions`. Returns [B, T, hidden_size] with T of :func:`num_tokens`, in the
        weights' type.
        """
        with sdpa_order(mel):
            features = self.apm(mel, visible_end)
        output: Tensor = self.audio_projection_layer(features)
        return output
