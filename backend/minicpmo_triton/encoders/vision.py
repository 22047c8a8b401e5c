"""The vision encoder: SigLIP tower and resampler, from uint8 patches to embedding rows.

The forward pass is safe to capture in a CUDA graph: what varies between two calls of equal shape is an
input, nothing is read back. Positions depend on a slice's rows and columns; they come in as look-up
indices, so that slices of equal patch count share a batch and a graph whatever their height and width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders.attention import SelfAttention, fuse_attention
from minicpmo_triton.encoders.kernels import (
    ROW_ALIGNMENT,
    VISION_KERNELS,
    KernelChoice,
    Switchable,
    add_norm,
    linear_gelu,
    runs_kernels,
    scale_patches,
    sdpa_order,
    use_kernels,
)
from minicpmo_triton.encoders.resampler import HEAD_DIM, Resampler, sincos_table
from minicpmo_triton.errors import CheckpointError
from minicpmo_triton.schema import PATCH_SIZE, PATCH_VALUES

#: Patches of one slice at most: as many as the tower has positions. Also bounds its longer side.
MAX_SLICE_PATCHES = 4900
#: Grids whose positions stay on the device; one of 1024 patches takes 24 KiB.
MAX_CACHED_GRIDS = 256

#: Width of the layer between, and up to how many rows it pays (H200: 38 against 41 us at 1024 rows).
WIDTH_ALIGNMENT = 128
WIDENED_ROWS = 2048

Grid = tuple[int, int]  # rows, columns of patches


@dataclass(frozen=True)
class TowerConfig:
    """``vision_config`` of config.json; the defaults are SigLIP's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    image_size: int
    patch_size: int
    num_channels: int = 3
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @property
    def grid_side(self) -> int:
        """Positions along one side of the tower's square table (70)."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class VisionConfig:
    """Top-level fields of config.json that the vision encoder depends on."""

    hidden_size: int
    query_num: int
    drop_vision_last_layer: bool


def read_vision_config(checkpoint: Checkpoint) -> tuple[VisionConfig, TowerConfig]:
    """Both configs, or :class:`CheckpointError` naming what is missing or not as this code computes it."""
    config = checkpoint.section("", VisionConfig)
    tower = checkpoint.section("vision_config", TowerConfig)
    checks = {
        "drop_vision_last_layer must be false": not config.drop_vision_last_layer,
        f"hidden_size must be a multiple of {HEAD_DIM}": config.hidden_size % HEAD_DIM == 0,
        f"vision_config.patch_size must be {PATCH_SIZE}": tower.patch_size == PATCH_SIZE,
        "vision_config.num_channels must be 3": tower.num_channels == 3,
        "vision_config.hidden_act must be gelu_pytorch_tanh": tower.hidden_act == "gelu_pytorch_tanh",
        "vision_config.hidden_size must be a multiple of num_attention_heads": (
            tower.hidden_size % tower.num_attention_heads == 0
        ),
    }
    if problems := [rule for rule, holds in checks.items() if not holds]:
        raise CheckpointError(f"{checkpoint.path}: unsupported config.json: {'; '.join(problems)}")
    return config, tower


class Mlp(Switchable):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)

    def prepare(self) -> None:
        """Widen the layer between with zeros, which change nothing: 4304 columns become 4352."""
        more = -self.inner % WIDTH_ALIGNMENT
        self.fc1.weight = nn.Parameter(F.pad(self.fc1.weight.detach(), (0, 0, 0, more)))
        self.fc1.bias = nn.Parameter(F.pad(self.fc1.bias.detach(), (0, more)))
        self.fc2.weight = nn.Parameter(F.pad(self.fc2.weight.detach(), (0, more)))

    def forward(self, x: Tensor) -> Tensor:
        # Products of few rows are faster at the aligned width; those of many do the work of the zeros.
        few = runs_kernels(x) and x.shape[0] * x.shape[1] <= WIDENED_ROWS
        width = self.fc1.out_features if not few else len(self.fc1.weight)
        inner = linear_gelu(x, self.fc1.weight[:width], self.fc1.bias[:width], "tanh", self.kernels)
        return F.linear(inner, self.fc2.weight[:, :width], self.fc2.bias)


class VisionLayer(Switchable):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.layer_norm1 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.self_attn = SelfAttention(dim, config.num_attention_heads, key_bias=True)
        self.layer_norm2 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = Mlp(dim, config.intermediate_size)

    def forward(self, x: Tensor, normed: Tensor, next_norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """x and its first layer norm -> this layer's output and ``next_norm`` of it, all [B, N, D]."""
        x, normed = add_norm(x, self.self_attn(normed, None), self.layer_norm2, self.kernels)
        return add_norm(x, self.mlp(normed), next_norm, self.kernels)


class PatchEmbeddings(Switchable):
    """The tower's first layer: a convolution that touches each pixel once is a product over patches."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, dim, patch, patch)
        self.position_embedding = nn.Embedding(config.grid_side**2, dim)

    def prepare(self) -> None:
        """Lay the convolution out as a product whose rows are aligned: 588 columns become 592."""
        weight = self.patch_embedding.weight.detach().flatten(1)
        self.register_buffer("weight", F.pad(weight, (0, -weight.shape[1] % ROW_ALIGNMENT)), persistent=False)

    def forward(self, patches: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """patches uint8 [B, N, 588], position_ids [B, N] -> both embeddings, to be added, [B, N, D]."""
        weight = self.get_buffer("weight")  # [D, 592]
        pixels = scale_patches(patches, weight.shape[1], weight.dtype, self.kernels)
        embedded = F.linear(pixels, weight, self.patch_embedding.bias)
        return embedded, self.position_embedding(position_ids)


class VisionTower(Switchable):
    """SigLIP's vision transformer; every layer is used."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        """patches uint8 [B, N, 588], position_ids [B, N] -> features [B, N, D]."""
        layers = cast(list[VisionLayer], list(self.encoder.layers))  # type: ignore[arg-type]
        norms = [layer.layer_norm1 for layer in layers]
        embedded, positions = self.embeddings(patches, position_ids)
        x, normed = add_norm(embedded, positions, norms[0], self.kernels)
        for layer, next_norm in zip(layers, [*norms[1:], self.post_layernorm], strict=True):
            x, normed = layer(x, normed, next_norm)
        output: Tensor = normed
        return output


class VisionModule(nn.Module):
    """Tower and resampler. After the weights are in place, :meth:`prepare` must run once."""

    def __init__(self, config: VisionConfig, tower: TowerConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_queries = config.query_num
        self.grid_side = tower.grid_side
        self.vpm = VisionTower(tower)
        self.resampler = Resampler(config.query_num, config.hidden_size, tower.hidden_size)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> VisionModule:
        """The module with the checkpoint's weights, ready to run; :class:`CheckpointError` otherwise."""
        config, tower = read_vision_config(checkpoint)
        with torch.device("meta"):
            module = cls(config, tower)
        checkpoint.load_module(module.vpm, "vpm.", dtype, device)
        checkpoint.load_module(module.resampler, "resampler.", dtype, device)
        return module.prepare()

    def prepare(self, kernels: KernelChoice = VISION_KERNELS) -> VisionModule:
        """Lay the weights out as the forward pass reads them, and compile its kernels."""
        fuse_attention(self)
        self.vpm.embeddings.prepare()
        for part in self.vpm.modules():
            if isinstance(part, Mlp):
                part.prepare()
        self.resampler.prepare()
        table = sincos_table(MAX_SLICE_PATCHES, self.hidden_size // 2)  # rounded from float32 once
        self.register_buffer("position_table", table.to(self.resampler.proj), persistent=False)
        self.requires_grad_(False).eval()
        self.use_kernels(kernels)
        return self

    @torch.inference_mode()
    def use_kernels(self, choice: KernelChoice) -> KernelChoice:
        """Compute as ``choice`` says if it runs here, and compile it now: a capture must not."""
        return use_kernels(self, choice, self._try)

    def _try(self) -> None:
        weight = self.resampler.proj
        for num_patches in (8, 128) if runs_kernels(weight) else ():  # few rows and many
            example = _grey_slice((1, num_patches), self.grid_side)
            self.forward(*(tensor[None].to(weight.device) for tensor in example))

    def forward(self, patches: Tensor, position_ids: Tensor, resampler_positions: Tensor) -> Tensor:
        """Encode slices of N patches.

        patches uint8 [B, N, 588]; position_ids int64 [B, N], see :func:`tower_positions`;
        resampler_positions int64 [B, N, 2], column and row of each patch. Returns
        [B, num_queries, hidden_size] in the weights' type.
        """
        with sdpa_order(patches):
            features = self.vpm(patches, position_ids)
            positions = F.embedding(resampler_positions, self.get_buffer("position_table")).flatten(-2)
            output: Tensor = self.resampler(features, positions)
        return output


def tower_positions(grid: Grid, grid_side: int) -> Tensor:
    """Index into the tower's position table of each patch, int64 [rows * columns] on the CPU.

    A patch's fractional coordinate falls into one of ``grid_side`` equal buckets per axis, as SigLIP
    trained for variable sizes does it. Kept in float32: the border cases are decided by its rounding.
    """
    boundaries = torch.arange(1 / grid_side, 1.0, 1 / grid_side)
    row, column = (
        torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / length), boundaries, right=True) for length in grid
    )
    return (row[:, None] * grid_side + column).flatten()


def resampler_positions(grid: Grid) -> Tensor:
    """Column and row of each patch, int64 [rows * columns, 2] on the CPU."""
    rows, columns = grid
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack((column, row), dim=-1).flatten(0, 1)


def _grey_slice(grid: Grid, grid_side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Patches and both positions, on the CPU."""
    patches = torch.full((grid[0] * grid[1], PATCH_VALUES), 128, dtype=torch.uint8)
    return patches, tower_positions(grid, grid_side), resampler_positions(grid)


class PositionCache:
    """Positions of the grids seen lately, on the device, so that a batch costs no transfer for them."""

    def __init__(self, grid_side: int, device: torch.device) -> None:
        self._grid_side = grid_side
        self._device = device
        self._grids: OrderedDict[Grid, tuple[Tensor, Tensor]] = OrderedDict()

    def batch(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """position_ids [B, N] and resampler_positions [B, N, 2] of grids with N patches each."""
        if len(grids) == 1:  # views instead of copies
            tower_ids, resampler_ids = self._positions(grids[0])
            return tower_ids[None], resampler_ids[None]
        tower, resampler = zip(*map(self._positions, grids), strict=True)
        return torch.stack(tower), torch.stack(resampler)

    def _positions(self, grid: Grid) -> tuple[Tensor, Tensor]:
        if grid not in self._grids:
            if len(self._grids) == MAX_CACHED_GRIDS:
                self._grids.popitem(last=False)
            positions = (tower_positions(grid, self._grid_side), resampler_positions(grid))
            self._grids[grid] = tuple(map(self._to_device, positions))  # type: ignore[assignment]
        self._grids.move_to_end(grid)
        return self._grids[grid]

    def _to_device(self, indices: Tensor) -> Tensor:
        if self._device.type == "cuda":
            indices = indices.pin_memory()
        return indices.to(self._device, non_blocking=True)
