"""Slicing as the goldens, and resizing as Pillow."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from minicpmo_triton.media import image as image_module
from minicpmo_triton.media import resize as resize_module
from minicpmo_triton.media import slicing
from minicpmo_triton.media.image import decode_image
from minicpmo_triton.media.resize import pixels_of
from minicpmo_triton.media.slicing import plan_slices, slice_image

CASES = ("image_small_upscaled", "image_sliced", "image_wide_sliced", "image_gray", "two_images", "frames")


@pytest.mark.parametrize("case", CASES)
def test_patches_are_the_goldens_pixels(
    case: str,
    goldens: dict[str, Any],
    golden_arrays: Callable[[str], Mapping[str, np.ndarray]],
    media_dir: Path,
) -> None:
    request, expected = goldens[case]["request"], goldens[case]["expected"]
    names = [p["image"] for p in request["messages"][0]["content"] if p["type"] == "image"]
    sliced = [
        slice_image(
            decode_image("image", (media_dir / n).read_bytes(), 10**8), request.get("max_slice_nums", 9)
        )
        for n in names
    ]
    grids = np.concatenate([s.grid_sizes for s in sliced])
    assert grids.tolist() == expected["tgt_sizes"]
    slices = np.split(np.concatenate([s.patches for s in sliced]), np.cumsum(grids.prod(axis=1))[:-1])
    samples = golden_arrays(case)
    for i, patches in enumerate(slices):
        # [patches, 588] uint8 -> the reference's [3, 14, patches * 14] normalised float32
        ordered = patches.reshape(-1, 3, 14, 14).transpose(1, 2, 0, 3).astype(np.float32)
        normalised = (ordered / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        np.testing.assert_array_equal(
            normalised.ravel()[samples[f"pixel_{i}_idx"]], samples[f"pixel_{i}_val"]
        )
        assert zlib.crc32(normalised.tobytes()) == expected["pixel_crc"][i]


@pytest.mark.parametrize("max_slices", [1, 2, 9, 36])
@pytest.mark.parametrize("size", [(1, 1), (448, 448), (449, 448), (4000, 3000), (200, 40_000), (30_000, 150)])
def test_plans_stay_in_bounds(size: tuple[int, int], max_slices: int) -> None:
    plan = plan_slices(*size, max_slices)
    num_slices = plan.rows * plan.columns
    assert num_slices <= max_slices
    assert num_slices != 1
    # 448 x 448 is 1024 patches; rounding each side to patches moves the area by a little.
    assert plan.source[0] * plan.source[1] / 14**2 < 1200
    if num_slices:
        assert plan.refined[0] % (14 * plan.columns) == plan.refined[1] % (14 * plan.rows) == 0
        assert plan.refined[0] * plan.refined[1] / 14**2 / num_slices < 1200


def test_slices_are_the_refined_picture_cut_row_by_row() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (700, 1500, 3), np.uint8)
    image = Image.fromarray(pixels)
    plan = plan_slices(1500, 700, 9)
    result = slice_image(image, 9)
    assert (plan.rows, plan.columns) == (result.rows, result.columns) == (2, 3)
    width, height = plan.refined[0] // 3, plan.refined[1] // 2
    refined = np.asarray(image.resize(plan.refined, Image.Resampling.BICUBIC))
    start = int(result.grid_sizes[0].prod())
    for index in range(6):
        row, column = divmod(index, 3)
        piece = refined[row * height : (row + 1) * height, column * width : (column + 1) * width]
        rows, columns = result.grid_sizes[1 + index]
        for patch in (0, rows * columns - 1, columns + 2):
            y, x = divmod(int(patch), int(columns))
            expected = piece[14 * y : 14 * y + 14, 14 * x : 14 * x + 14].transpose(2, 0, 1).ravel()
            np.testing.assert_array_equal(result.patches[start + patch], expected)
        start += rows * columns
    assert start == len(result.patches)


@pytest.mark.parametrize("size", [(1999, 1501), (150, 20_011), (300, 400)])
def test_a_pool_changes_no_bit(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    with ThreadPoolExecutor(3) as pool:
        shared = slice_image(image, 9, pool=pool)
    alone = slice_image(image, 9)
    np.testing.assert_array_equal(shared.patches, alone.patches)
    np.testing.assert_array_equal(shared.grid_sizes, alone.grid_sizes)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("size", [(300, 200), (2500, 1800)])  # of 16 MiB Pillow makes a new block of memory
def test_pixels_are_the_pictures_wherever_pillow_keeps_them(
    size: tuple[int, int], arrow: bool, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    if not arrow:  # a Pillow before 11.2
        monkeypatch.setattr(resize_module, "_view", lambda core: None)
    upright = (
        noise
        if orientation == 1
        else np.asarray(image.transpose(image_module._ORIENTATION_TRANSPOSE[orientation]))
    )
    pixels = pixels_of(image, 20, 150, orientation)
    del image
    others = [Image.new("RGB", size) for _ in range(3)]  # would take the memory if it were free
    assert pixels.shape == (130, upright.shape[1])
    colours = np.ascontiguousarray(pixels).view(np.uint8).reshape(*pixels.shape, 4)[..., :3]
    np.testing.assert_array_equal(colours, upright[20:150])
    del others


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    max_slices=st.integers(1, 9),
    task_pixels=st.sampled_from([1, 5_000, 40_000, 1 << 19]),
    seed=st.integers(0, 3),
)
def test_pieces_are_whole_resizes_of_pillow_rows_first(
    width: int, height: int, max_slices: int, task_pixels: int, seed: int
) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "_TASK_PIXELS", task_pixels)
        result = slice_image(image, max_slices, scale_resolution=112)
    plan = plan_slices(width, height, max_slices, 112)
    start = 0
    for size, rows, columns in ((plan.source, 1, 1), (plan.refined, plan.rows, plan.columns)):
        end = start + size[0] * size[1] // 14**2
        if end > start:
            narrow = image.resize((size[0], height), Image.Resampling.BICUBIC)
            whole = np.asarray(narrow.resize(size, Image.Resampling.BICUBIC))
            if width >= 2 * max(height, size[0]) and height >= 50:  # any Pillow takes the rows first here
                one_call = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
                np.testing.assert_array_equal(whole, one_call)
            cut = result.patches[start:end].reshape(
                rows, columns, size[1] // rows // 14, size[0] // columns // 14, 3, 14, 14
            )
            pixels = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(whole.shape)
            np.testing.assert_array_equal(pixels, whole)
        start = end
    assert start == len(result.patches)
