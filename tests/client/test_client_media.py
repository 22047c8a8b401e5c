"""The client's own PNG and WAV encoders against the decoders the server uses, and what it refuses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minicpmo_client.errors import InvalidRequest
from minicpmo_client.media import audio_bytes, encode_png, encode_wav, image_bytes

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("shape", "mode"),
    [((5, 7), "L"), ((5, 7, 3), "RGB"), ((5, 7, 4), "RGBA"), ((1, 1), "L"), ((300, 211, 3), "RGB")],
)
def test_png_decodes_to_the_same_pixels(shape: tuple[int, ...], mode: str) -> None:
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    decoded = Image.open(io.BytesIO(encode_png(pixels)))
    decoded.load()
    assert decoded.mode == mode
    np.testing.assert_array_equal(np.asarray(decoded), pixels)


def test_png_takes_views_that_are_not_contiguous() -> None:
    pixels = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)[::-2, ::3, ::-1]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
@pytest.mark.parametrize("shape", [(1,), (1001,), (999, 2), (4, 6)])
def test_wav_decodes_to_the_same_samples(dtype: Any, shape: tuple[int, ...]) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = (RNG.uniform(-1, 1, shape) * (1 if dtype is np.float32 else 32767)).astype(dtype)
    decoded, sample_rate = soundfile.read(io.BytesIO(encode_wav(samples, 22050)), dtype=np.dtype(dtype).name)
    assert sample_rate == 22050
    np.testing.assert_array_equal(decoded, samples)


def test_wav_takes_other_byte_orders_and_strides() -> None:
    samples = np.arange(-6, 6, dtype=np.int16)
    assert encode_wav(samples.astype(">i2"), 16000) == encode_wav(samples, 16000)
    assert encode_wav(samples[::2], np.int64(16000)) == encode_wav(samples[::2].copy(), 16000)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros((2, 2), np.float32), r"expected an array of uint8 \(0..255\), got float32"),
        (np.zeros((2, 2), np.bool_), "got bool"),
        (np.zeros((3, 8, 8), np.uint8), r"got \(3, 8, 8\)"),
        (np.zeros((2, 2, 2), np.uint8), r"got \(2, 2, 2\)"),
        (np.zeros((0, 4, 3), np.uint8), r"got \(0, 4, 3\)"),
        (np.uint8(3) * np.ones(4, np.uint8), r"got \(4,\)"),
        (b"", "is empty"),
        (None, "expected a path, bytes, a uint8 array or a Pillow image, got NoneType"),
        ("no/such/file.png", "cannot read 'no/such/file.png': No such file or directory"),
        ("nul\0byte", "cannot read"),
    ],
)
def test_wrong_images_name_the_field(value: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^here: .*{problem}"):
        image_bytes(value, "here")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (np.zeros(5, np.float32), "got ndarray without its sample rate"),
        ((np.zeros(5, np.float64), 16000), "expected samples of float32 or int16, got float64"),
        ((np.zeros((2, 16000), np.float32), 16000), r"at most 64 channels, got \(2, 16000\)"),
        ((np.zeros((2, 2, 2), np.int16), 16000), r"got \(2, 2, 2\)"),
        ((np.zeros((0,), np.int16), 16000), r"got \(0,\)"),
        ((np.zeros((5, 0), np.int16), 16000), r"got \(5, 0\)"),
        ((np.zeros(5, np.int16), 16000.0), "expected a whole sample rate in Hz, got 16000.0"),
        ((np.zeros(5, np.int16), True), "got True"),
        ((np.zeros(5, np.int16), 0), "0 Hz is out of range"),
        ((np.zeros(5, np.int16), 2**31), "out of range"),
        (([0.0, 0.1], 16000), "got tuple"),
    ],
)
def test_wrong_audio_names_the_field(value: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^here: .*{problem}"):
        audio_bytes(value, "here")


def test_files_and_bytes_pass_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "any"
    path.write_bytes(b"\x00\xffcontent")
    for value in (path, str(path), b"\x00\xffcontent", bytearray(b"\x00\xffcontent")):
        assert image_bytes(value) == audio_bytes(value) == b"\x00\xffcontent"
    assert image_bytes("data:image/png;base64,AAAA") == b"data:image/png;base64,AAAA"


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
def test_pillow_images_are_taken_without_loss(mode: str) -> None:
    image = Image.fromarray(RNG.integers(0, 256, (9, 5, 3), dtype=np.uint8)).convert(mode)
    decoded = Image.open(io.BytesIO(image_bytes(image)))
    np.testing.assert_array_equal(np.asarray(decoded.convert("RGBA")), np.asarray(image.convert("RGBA")))


def test_pillow_images_keep_the_orientation_their_camera_noted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2)).save(buffer, "JPEG", exif=exif)
    image = Image.open(buffer)
    assert Image.open(io.BytesIO(image_bytes(image))).getexif()[0x0112] == 6


def test_a_pillow_image_that_png_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="here: cannot be saved as PNG"):
        image_bytes(Image.new("CMYK", (2, 2)), "here")
