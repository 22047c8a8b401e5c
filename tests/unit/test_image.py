"""Decoding to RGB, and refusals."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.image import decode_image

GRADIENT = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_image("image[0]", data, 10_000))


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


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG_HEAD = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 600, 600, 8, 2, 0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xd8\xff" + bytes(10**6), id="JPEG without a marker"),
        pytest.param(b"\xff\xd8" + b"\xff\xfe\0\2" * 250_000, id="JPEG of empty comments"),
        pytest.param(PNG_HEAD + chunk(b"tEXt", b"a\0b") * 100_000, id="PNG of small texts"),
        pytest.param(PNG_HEAD + chunk(b"IDAT", b"") * 100_000, id="PNG of empty data"),
        pytest.param(b"GIF89a" + bytes(7) + b"\x21\xfe\0" * 300_000, id="GIF of empty comments"),
        pytest.param(b"P6\n" + b"#\n" * 500_000, id="PPM of empty comments"),
    ],
)
def test_junk_that_pillow_reads_byte_by_byte_is_given_up(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="too many small parts"):
        decode_image("image", data, 10**6)


def test_a_picture_of_small_chunks_is_read() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    pieces = b"".join(chunk(b"IDAT", rows[i : i + 256]) for i in range(0, len(rows), 256))
    image = decode_image("image", PNG_HEAD + pieces + chunk(b"IEND", b""), 10**6)
    assert (np.asarray(image) == pixels).all()
