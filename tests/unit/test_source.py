"""An element is told apart as file bytes, base64 or data URI, and its size is held."""

from __future__ import annotations

import base64

import pytest

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.source import media_bytes

HEADS = {
    "jpeg": b"\xff\xd8\xff\xe0",
    "png": b"\x89PNG\r\n\x1a\n",
    "gif": b"GIF89a",
    "webp": b"RIFF\x00\x00\x00\x00WEBP",
    "bmp": b"BM",
    "netpbm": b"P6\n2 2\n255\n",
    "flac": b"fLaC",
    "ogg": b"OggS",
    "mp3": b"ID3\x04",
    "mp3 without tags": b"\xff\xfb\x90\x64",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_file_base64_and_data_uri_give_the_same_bytes(head: bytes) -> None:
    data = head + bytes(range(200))
    encoded = base64.b64encode(data)
    wrapped = base64.encodebytes(data)
    assert media_bytes("image[0]", data, 1000) == data
    assert media_bytes("image[0]", encoded, 1000) == data
    assert media_bytes("image[0]", wrapped, 1000) == data
    assert media_bytes("image[0]", b"data:image/png;base64," + encoded, 1000) == data
    assert media_bytes("image[0]", b"DATA:;charset=x;BASE64," + encoded, 1000) == data


@pytest.mark.parametrize("length", range(1, 8))
def test_base64_of_every_padding_is_measured_exactly(length: int) -> None:
    data = bytes(range(length))
    encoded = base64.b64encode(data)
    assert media_bytes("audio[0]", encoded, length) == data
    with pytest.raises(InvalidArgument, match=rf"audio\[0\]: holds {length} bytes; at most {length - 1}"):
        media_bytes("audio[0]", encoded, length - 1)


def test_a_file_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 10 "):
        media_bytes("image[0]", HEADS["png"] + bytes(10), 10)


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (b"", "is empty"),
        (b"https://host/cat.png", "fetches nothing"),
        (b"file:///etc/passwd", "fetches nothing"),
        (b"hello world!", "neither"),
        (b"aGVsbG8", "neither"),  # padding missing
        (b"aGV=bG8=", "neither"),  # padding inside
        (b"====", "neither"),
        (b"data:image/png;base64", "without a comma"),
        (b"data:image/png,abc", "not base64"),
        (b"data:image/png;base64,", "neither"),
        (b"data:image/png;base64,!!!!", "neither"),
    ],
)
def test_what_is_none_of_the_three_is_refused(element: bytes, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        media_bytes("image[3]", element, 1000)
    assert caught.value.field == "image[3]"
