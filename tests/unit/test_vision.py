"""The vision encoder against the goldens and against plain restatements of its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders import random_weights
from minicpmo_triton.encoders.batching import VisionEncoder, VisionItem
from minicpmo_triton.encoders.vision import (
    MAX_CACHED_GRIDS,
    PositionCache,
    VisionModule,
    read_vision_config,
    resampler_positions,
    tower_positions,
)
from minicpmo_triton.errors import CheckpointError, InvalidArgument
from minicpmo_triton.media.image import decode_image
from minicpmo_triton.media.slicing import slice_image

GOLDENS = (
    "image_small_upscaled",
    "image_sliced",
    "image_wide_sliced",
    "image_gray",
    "two_images",
    "frames",
    "image_and_audio",
)

#: Seen: 5e-7 in float32. An error as small as the other form of GELU, or another epsilon, is over 1e-5.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def golden_item(case: Mapping[str, Any], media_dir: Path) -> VisionItem:
    """The case's slices, by the project's own preprocessing."""
    request = case["request"]
    images = [
        slice_image(
            decode_image("image", (media_dir / part["image"]).read_bytes(), 10**8),
            request.get("max_slice_nums", 9),
        )
        for message in request["messages"]
        for part in message["content"]
        if isinstance(part, dict) and part["type"] == "image"
    ]
    return VisionItem(
        patches=np.concatenate([image.patches for image in images]),
        grid_sizes=np.concatenate([image.grid_sizes for image in images]),
    )


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: Path) -> VisionEncoder:
    return VisionEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu")


@pytest.fixture(scope="module")
def module(tiny_checkpoint: Path) -> VisionModule:
    return VisionModule.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu")


def random_inputs(batch: int, grid: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "patches": torch.randint(
            0, 256, (batch, math.prod(grid), 588), dtype=torch.uint8, generator=generator
        ),
        "position_ids": tower_positions(grid, 70).expand(batch, -1),
        "resampler_positions": resampler_positions(grid).expand(batch, -1, -1),
    }


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_reproduce_the_goldens(
    name: str,
    dtype: torch.dtype,
    tiny_checkpoint: Path,
    goldens: Mapping[str, Any],
    golden_arrays: Callable[[str], Mapping[str, np.ndarray]],
    media_dir: Path,
) -> None:
    encoder = VisionEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), dtype, "cpu")
    item = golden_item(goldens[name], media_dir)
    assert item.grid_sizes.tolist() == goldens[name]["expected"]["tgt_sizes"]
    (embeds,) = encoder.encode([item])
    assert isinstance(embeds, torch.Tensor)
    assert embeds.dtype == dtype
    expected = torch.from_numpy(golden_arrays(name)["vision_embeds"])
    for actual, golden in zip(embeds.view(expected.shape), expected, strict=True):
        assert relative_error(actual, golden) < TOLERANCE[dtype]


def test_a_slice_is_the_same_alone_and_in_a_batch(module: VisionModule) -> None:
    inputs = random_inputs(16, (22, 45))
    with torch.inference_mode():
        together = module(**inputs)
        for index in range(16):
            alone = module(**{name: tensor[index : index + 1] for name, tensor in inputs.items()})
            assert relative_error(alone[0], together[index]) < 1e-6


def test_a_slice_depends_on_its_grid_and_not_on_its_neighbours_grid(module: VisionModule) -> None:
    tall, wide = random_inputs(1, (30, 34)), random_inputs(1, (34, 30))
    mixed = {name: torch.cat((tall[name], wide[name])) for name in tall}
    with torch.inference_mode():
        together = module(**mixed)
        assert relative_error(together[0], module(**tall)[0]) < 1e-6
        assert relative_error(together[1], module(**wide)[0]) < 1e-6
        assert relative_error(together[0], together[1]) > 1e-3  # the same patches, laid out otherwise


def test_forward_traces_without_reading_a_value(module: VisionModule) -> None:
    inputs = random_inputs(2, (3, 5))
    exported = torch.export.export(module, (), inputs, strict=True).module()
    assert relative_error(exported(**inputs), module(**inputs)) < 1e-6


def test_tower_positions_of_a_full_grid_count_up() -> None:
    assert torch.equal(tower_positions((70, 70), 70), torch.arange(4900))


@pytest.mark.parametrize("grid", [(1, 1), (23, 45), (32, 32), (7, 200)])
def test_tower_positions_are_buckets_of_fractional_coordinates(grid: tuple[int, int]) -> None:
    ids = tower_positions(grid, 70).view(grid)
    rows, columns = ids // 70, ids % 70
    for axis, buckets in enumerate((rows, columns)):
        along = buckets.select(1 - axis, 0)
        exact = torch.arange(grid[axis], dtype=torch.float64) * 70 / grid[axis]
        # Rounding may put a coordinate that lies on a border into the bucket below it.
        assert ((along - exact.floor() == 0) | (exact - along - 1).abs().lt(1e-4)).all()
        assert (buckets == along.unsqueeze(1 - axis)).all()


def test_resampler_positions_are_column_and_row() -> None:
    assert resampler_positions((2, 3)).tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]


def test_other_requests_pass_between_batches(encoder: VisionEncoder) -> None:
    random = np.random.default_rng(1)
    large = VisionItem(random.integers(0, 256, (20 * 4, 588), np.uint8), np.full((20, 2), 2, np.int32))
    small = VisionItem(random.integers(0, 256, (6, 588), np.uint8), np.array([[2, 3]], np.int32))
    (alone,) = encoder.encode([small])
    (expected,) = encoder.encode([large])
    passed: list[torch.Tensor | InvalidArgument] = []
    (rows,) = encoder.encode([large], between=lambda: passed.extend(encoder.encode([small])))
    assert isinstance(rows, torch.Tensor)
    assert isinstance(alone, torch.Tensor)
    assert len(passed) == 1  # 20 slices are batches of 16 and 4
    assert torch.equal(rows, expected)
    assert torch.equal(passed[0], alone)


def test_a_grid_longer_than_the_tower_table_is_encoded(encoder: VisionEncoder) -> None:
    item = VisionItem(np.zeros((900, 588), np.uint8), np.array([[9, 100]], np.int32))
    (embeds,) = encoder.encode([item])
    assert isinstance(embeds, torch.Tensor)
    assert embeds.isfinite().all()


def test_the_resampler_is_torchs_multihead_attention() -> None:
    config, tower = random_weights.VISION
    small = type(config)(256, 4, False), type(tower)(64, 96, 2, 1, 980, 14)
    resampler = random_weights.random_vision_module(torch.float32, "cpu", config=small).resampler
    reference = torch.nn.MultiheadAttention(256, num_heads=2, batch_first=True)
    reference.load_state_dict(resampler.attn.state_dict())
    features, positions = torch.randn(3, 10, 64), torch.randn(3, 10, 256)
    values = resampler.ln_kv(F.linear(features, resampler.kv_proj.weight))
    query = resampler.ln_q(resampler.query).expand(3, -1, -1)
    attended, _ = reference(query, values + positions, values)
    expected = (resampler.ln_post(attended) @ resampler.proj).detach()
    assert relative_error(resampler(features, positions), expected) < 1e-5


def test_the_position_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache = PositionCache(70, torch.device("cpu"))
    first = cache.batch([(1, 2)])[0]
    kept = cache._positions((1, 1))
    for columns in range(2, MAX_CACHED_GRIDS + 2):
        cache.batch([(1, columns)])
        assert cache._positions((1, 1)) is kept
    assert len(cache._grids) == MAX_CACHED_GRIDS
    assert (1, 2) not in cache._grids
    assert torch.equal(cache.batch([(1, 2)])[0], first)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("", "drop_vision_last_layer", True),
        ("", "hidden_size", 130),
        ("vision_config", "patch_size", 16),
        ("vision_config", "num_channels", 1),
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "num_attention_heads", 7),
    ],
)
def test_a_config_computed_otherwise_is_refused(
    section: str, field: str, value: object, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (config[section] if section else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field):
        read_vision_config(Checkpoint(tmp_path))


def test_random_weights_have_the_published_dimensions(fixtures_dir: Path) -> None:
    published = fixtures_dir.parent / "minicpm-o-4_5"
    if not published.is_dir():
        pytest.skip("the published config.json is not at hand")
    assert read_vision_config(Checkpoint(published)) == random_weights.VISION


def test_random_weights_follow_their_seed() -> None:
    config, tower = random_weights.VISION
    small = type(config)(128, 4, False), type(tower)(32, 48, 2, 1, 980, 14)
    first, again, other = (
        random_weights.random_vision_module(torch.float32, "cpu", seed, small).resampler.query
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
