"""Decoding to RGB, slicing as the goldens, and refusals."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media import image as image_module
from minicpmo_triton.media import resize as resize_module
from minicpmo_triton.media.image import decode_and_slice, decode_image, plan_slices, slice_image
from minicpmo_triton.media.resize import pixels_of

CASES = ("image_small_upscaled", "image_sliced", "image_wide_sliced", "image_gray", "two_images", "frames")
GRADIENT = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_image("image[0]", data, 10_000))


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
        patch.setattr(image_module, "_TASK_PIXELS", task_pixels)
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


@pytest.fixture
def read_so_far(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of the file had been read when each band was begun."""
    files: list[io.BytesIO] = []
    places: list[int] = []
    take = image_module._Slicing._take

    class File(image_module._WatchedFile):
        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            files.append(self)

    def noted(*arguments: Any) -> None:
        places.append(files[-1].tell())
        take(*arguments)

    monkeypatch.setattr(image_module, "_WatchedFile", File)
    monkeypatch.setattr(image_module._Slicing, "_take", noted)
    return places


def noisy(width: int, height: int, image_format: str = "JPEG", seed: int = 0, **options: Any) -> bytes:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), np.uint8))
    mode = options.pop("mode", "RGB")
    return encoded(small.resize((width, height)).convert(mode), image_format, **options)


def png(pixels: np.ndarray, interlaced: bool = False, exif_behind: bytes = b"") -> bytes:
    """As Pillow does not write one: in the seven passes of Adam7, or with metadata behind the pixels."""
    passes = [
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ]
    lines = b"".join(
        b"\0" + row.tobytes()
        for top, left, down, across in (passes if interlaced else [(0, 0, 1, 1)])
        for row in pixels[top::down, left::across]
        if row.size
    )
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, interlaced)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    if exif_behind:
        chunks.insert(2, (b"eXIf", exif_behind))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, comparable, or what it raises; how much was read at once may stand in brackets."""
    try:
        result = call()
    except InvalidArgument as error:
        return str(error).partition(" (")[0]
    return result.patches.tobytes(), result.grid_sizes.tolist(), result.rows, result.columns


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 700),
    height=st.integers(1, 700),
    mode=st.sampled_from(["RGB", "RGB", "RGB", "L", "CMYK"]),
    image_format=st.sampled_from(["JPEG", "JPEG", "PNG"]),
    options=st.fixed_dictionaries(
        {
            "quality": st.sampled_from([20, 75, 95]),
            "subsampling": st.sampled_from([0, 1, 2]),
            "progressive": st.booleans(),
            "optimize": st.booleans(),
            "restart_marker_rows": st.sampled_from([0, 1, 3]),
        }
    ),
    orientation=st.sampled_from([1, 1, 1, *range(10)]),
    num_looks=st.sampled_from([3, 24, 100]),
    block=st.sampled_from([500, 4000, 1 << 16]),
    task_pixels=st.sampled_from([1, 5_000, 40_000]),
    damage=st.sampled_from(["none", "none", "cut", "flipped"]),
    seed=st.integers(0, 1000),
)
def test_resizing_while_a_file_is_decoded_changes_no_bit(
    width: int,
    height: int,
    mode: str,
    image_format: str,
    options: dict[str, Any],
    orientation: int,
    num_looks: int,
    block: int,
    task_pixels: int,
    damage: str,
    seed: int,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    if image_format == "PNG":
        mode, options = mode.replace("CMYK", "P"), {}
    data = bytearray(noisy(width, height, image_format, seed, mode=mode, exif=exif, **options))
    rng = np.random.default_rng(seed)
    if damage == "cut":
        del data[rng.integers(1, len(data)) :]
    elif damage == "flipped":
        for place in rng.integers(0, len(data), 3):
            data[place] ^= 1 << rng.integers(8)
    arguments = ("image[0]", bytes(data), 1_000_000)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(image_module, "_TASK_PIXELS", task_pixels)
        patch.setattr(image_module, "_NUM_LOOKS", num_looks)
        patch.setattr(ImageFile, "MAXBLOCK", block)  # of Pillow: these files would be one block
        together = outcome(lambda: decode_and_slice(*arguments, 9, 112, pool))
        assert together == outcome(lambda: slice_image(decode_image(*arguments), 9, 112))


@pytest.mark.parametrize("bad", [b"\xff\xd8", b"\xff\x02", b"\xff\xc4\x00\x03\x00"])
@pytest.mark.parametrize("distance", [100, 500, 1200])
def test_what_is_wrong_behind_the_last_row_is_seen_as_by_pillow(distance: int, bad: bytes) -> None:
    comment = b"\xff\xfe" + struct.pack(">H", distance + 2) + bytes(distance)
    data = noisy(640, 480, quality=75)[:-2] + comment + bad + b"\xff\xd9"
    with ThreadPoolExecutor(2) as pool:
        together = outcome(lambda: decode_and_slice("image[0]", data, 10**6, 9, pool=pool))
    assert together == outcome(lambda: slice_image(decode_image("image[0]", data, 10**6), 9))


@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        ({}, True),
        ({"image_format": "PNG"}, True),
        ({"progressive": True}, False),
        ({"mode": "L"}, False),
        ({"image_format": "WEBP", "quality": 50}, False),
    ],
    ids=["jpeg", "png", "progressive", "grey", "webp"],
)
@pytest.mark.parametrize("size", [(1344, 1000), (2500, 1800)])  # in one piece of memory, and in several
def test_bands_begin_before_the_file_is_read(
    size: tuple[int, int], options: dict[str, Any], overlaps: bool, read_so_far: list[int]
) -> None:
    data = noisy(*size, **options)
    with ThreadPoolExecutor(2) as pool:
        decode_and_slice("image[0]", data, 10**8, 9, pool=pool)
    assert len(read_so_far) > 4
    assert read_so_far == sorted(read_so_far)
    shows_memory = hasattr(Image.new("RGB", (1, 1)).im, "__arrow_c_array__")  # Pillow 11.2 or newer
    assert (read_so_far[0] < len(data) / 2) == (overlaps and shows_memory)
    assert read_so_far[-1] > 0.9 * len(data)


def test_pngs_whose_rows_are_not_what_they_seem(read_so_far: list[int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (700, 900, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = png(pixels, exif_behind=exif.tobytes()[6:])
    with ThreadPoolExecutor(2) as pool:
        for data, expected in (
            (png(pixels, interlaced=True), pixels),
            (png(pixels), pixels),
            (turned, np.rot90(pixels, -1)),
        ):
            result = decode_and_slice("image[0]", data, 10**8, 9, pool=pool)
            np.testing.assert_array_equal(result.patches, slice_image(Image.fromarray(expected), 9).patches)


def test_memory_that_is_not_clear_is_not_taken_for_rows(
    monkeypatch: pytest.MonkeyPatch, read_so_far: list[int]
) -> None:
    """As a Pillow might leave it some day."""
    data = noisy(1344, 1000)
    expected = slice_image(decode_image("image[0]", data, 10**8), 9)
    read_so_far.clear()
    prepare = JpegImageFile.load_prepare

    def prepared(image: JpegImageFile) -> None:
        prepare(image)
        image.im.paste((1, 2, 3, 255), (0, 300, 1344, 500))

    monkeypatch.setattr(JpegImageFile, "load_prepare", prepared)
    with ThreadPoolExecutor(2) as pool:
        result = decode_and_slice("image[0]", data, 10**8, 9, pool=pool)
    np.testing.assert_array_equal(result.patches, expected.patches)
    assert read_so_far[0] == len(data)


def test_without_a_view_of_pillows_memory_nothing_begins_early(
    monkeypatch: pytest.MonkeyPatch, read_so_far: list[int]
) -> None:
    monkeypatch.setattr(resize_module, "_view", lambda core: None)  # a Pillow before 11.2
    data = noisy(1344, 1000)
    with ThreadPoolExecutor(2) as pool:
        decode_and_slice("image[0]", data, 10**8, 9, pool=pool)
    assert read_so_far[0] == len(data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(GRADIENT)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decoded(data), np.asarray(expected))


def test_transparency_is_composed_on_white() -> None:
    alpha = np.linspace(0, 255, 96).astype(np.uint8).reshape(8, 12)
    rgba = Image.fromarray(np.dstack([GRADIENT, alpha]))
    expected = 255 - (255 - GRADIENT.astype(float)) * alpha[..., None] / 255
    assert np.abs(decoded(encoded(rgba)).astype(float) - expected).max() <= 1
    opaque = Image.fromarray(np.dstack([GRADIENT, np.full_like(alpha, 255)]))
    np.testing.assert_array_equal(decoded(encoded(opaque)), GRADIENT)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_is_white(mode: str) -> None:
    image = Image.new(mode, (4, 4), 0)
    image.putpixel((1, 2), 9 if mode != "RGB" else (9, 9, 9))
    pixels = decoded(encoded(image, transparency=0 if mode != "RGB" else (0, 0, 0)))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[2, 1].tolist() != [255, 255, 255]


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    grey = (np.arange(96, dtype=np.uint16) * 600).reshape(8, 12)
    for image_format in ("PNG", "TIFF"):
        pixels = decoded(encoded(Image.fromarray(grey), image_format))
        np.testing.assert_array_equal(pixels, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize(
    ("mode", "image_format"), [("1", "PNG"), ("L", "PNG"), ("CMYK", "JPEG"), ("L", "WEBP"), ("P", "GIF")]
)
def test_other_modes_become_rgb(mode: str, image_format: str) -> None:
    image = Image.new(mode, (20, 10), 1 if mode != "CMYK" else (0, 255, 255, 0))
    pixels = decoded(encoded(image, image_format))
    assert pixels.shape == (10, 20, 3)
    if mode == "CMYK":
        assert pixels[5, 5, 0] > 200
        assert pixels[5, 5, 1] < 80


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded(data)[0, 0].tolist() == [255, 0, 0]


def test_limits_are_held_before_pixels_are_decoded() -> None:
    data = encoded(Image.new("L", (2000, 2000)))
    header_only = data[:60]
    with pytest.raises(InvalidArgument, match=r"image\[0\]: has 2000x2000 pixels; at most 10000"):
        decode_image("image[0]", header_only, 10_000)
    with pytest.raises(InvalidArgument, match="200 times"):
        decode_image("image[0]", encoded(Image.new("L", (201, 1))), 10_000)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_truncated_file_is_refused(image_format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)
    data = encoded(Image.fromarray(noise), image_format)
    with pytest.raises(InvalidArgument) as caught:
        decode_image("image[1]", data[: len(data) // 2], 10_000)
    assert caught.value.field == "image[1]"


def test_what_is_no_picture_is_refused() -> None:
    for data in (b"RIFF....WAVEfmt ", b"%!PS-Adobe-3.0 EPSF", b"\x00" * 50):
        with pytest.raises(InvalidArgument, match="not an image of a supported format"):
            decode_image("image[0]", data, 10_000)
    with pytest.raises(InvalidArgument, match="floating-point"):
        decode_image("image[0]", encoded(Image.new("F", (4, 4)), "TIFF"), 10_000)
