"""Resizing while a file is being decoded gives what resizing afterwards does."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from minicpmo_triton.media import slicing
from minicpmo_triton.media.image import decode_and_slice, decode_image
from minicpmo_triton.media.slicing import slice_image

from .test_image import encoded


@pytest.fixture
def read_so_far(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of the file had been read when each band was begun."""
    files: list[io.BytesIO] = []
    places: list[int] = []
    take = slicing.Slicing._take

    class File(image_module._WatchedFile):
        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            files.append(self)

    def noted(*arguments: Any) -> None:
        places.append(files[-1].tell())
        take(*arguments)

    monkeypatch.setattr(image_module, "_WatchedFile", File)
    monkeypatch.setattr(slicing.Slicing, "_take", noted)
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
        patch.setattr(slicing, "_TASK_PIXELS", task_pixels)
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


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_a_fault_of_ours_is_not_the_files(image_format: str, read_so_far: list[int]) -> None:
    data = noisy(1344, 1344, image_format)
    with ThreadPoolExecutor(1) as pool:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            decode_and_slice("image", data, 10**8, 9, pool=pool)
    assert read_so_far[0] < len(data)  # it failed while the file was being decoded
