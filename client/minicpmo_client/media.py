"""Images, recordings and videos as the bytes of a file: read, passed through, or encoded without loss.

Needs the standard library and numpy only. Arrays become PNG or WAV, so the server decodes exactly the
values given here. Every function takes ``field``, the name that an error message starts with, and
``fetch``, which turns the URL of a field into bytes, or None where URLs are refused.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minicpmo_client.errors import InvalidRequest

MAX_AUDIO_CHANNELS = 64
_MAX_RIFF_BYTES = 2**32 - 1
_PNG_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> grey, RGB, RGBA
_WAV_FORMATS = {"int16": 1, "float32": 3}  # PCM, IEEE float
_EXIF_ORIENTATION = 0x0112

#: ``(url, field) -> bytes``
Fetch = Callable[[str, str], bytes]


def image_bytes(value: object, field: str = "image", fetch: Fetch | None = None) -> bytes:
    """The bytes of one image.

    Args:
        value: a path, bytes (a file's content, base64 or a data URI), a ``"data:"`` string, a uint8
            array [H, W], [H, W, 3] or [H, W, 4], or an image object with Pillow's ``save``.

    Raises:
        InvalidRequest: the file cannot be read, or the value is none of these.
    """
    content = _file_bytes(value, field, fetch)
    if content is not None:
        return content
    if isinstance(value, np.ndarray):
        return encode_png(value, field)
    if callable(getattr(value, "save", None)):
        return _save_png(value, field)
    raise InvalidRequest(
        f"{field}: expected a path, bytes, a uint8 array or a Pillow image, got {type(value).__name__}"
    )


def audio_bytes(value: object, field: str = "audio", fetch: Fetch | None = None) -> bytes:
    """The bytes of one recording.

    Args:
        value: a path, bytes (a file's content, base64 or a data URI), a ``"data:"`` string, or
            ``(samples, sample_rate)`` with float32 (in -1..1) or int16 samples [T] or [T, channels] and
            the rate in Hz.

    Raises:
        InvalidRequest: the file cannot be read, or the value is none of these.
    """
    content = _file_bytes(value, field, fetch)
    if content is not None:
        return content
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray):
        return encode_wav(value[0], value[1], field)
    hint = " without its sample rate" if isinstance(value, np.ndarray) else ""
    raise InvalidRequest(
        f"{field}: expected a path, bytes or (samples, sample_rate), got {type(value).__name__}{hint}"
    )


def video_bytes(value: object, field: str = "video", fetch: Fetch | None = None) -> bytes:
    """The bytes of one video.

    Args:
        value: a path, bytes (a file's content, base64 or a data URI), or a ``"data:"`` string.

    Raises:
        InvalidRequest: the file cannot be read, or the value is none of these.
    """
    content = _file_bytes(value, field, fetch)
    if content is None:
        raise InvalidRequest(f"{field}: expected a path or bytes, got {type(value).__name__}")
    return content


def is_url(value: object) -> bool:
    """Whether this is an ``http(s)`` URL, which somebody would have to fetch."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def encode_png(pixels: npt.NDArray[Any], field: str = "image") -> bytes:
    """A uint8 array [H, W], [H, W, 3] or [H, W, 4] (grey, RGB, RGBA) as a PNG file."""
    if pixels.dtype != np.uint8:
        raise InvalidRequest(f"{field}: expected an array of uint8 (0..255), got {pixels.dtype}")
    num_channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and num_channels not in (3, 4)) or pixels.size == 0:
        raise InvalidRequest(f"{field}: expected shape [H, W], [H, W, 3] or [H, W, 4], got {pixels.shape}")
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, width * num_channels)
    # Filter 2 ("up") on every row: neighbours differ little, and it is one subtraction modulo 256.
    filtered = np.empty((height, 1 + rows.shape[1]), dtype=np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOUR_TYPES[num_channels], 0, 0, 0)
    # Run lengths only: as small as zlib's level 1 on photographs and up to three times as fast.
    compressor = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    data = compressor.compress(filtered.data) + compressor.flush()
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", data), _png_chunk(b"IEND", b""))
    )


def encode_wav(samples: npt.NDArray[Any], sample_rate: object, field: str = "audio") -> bytes:
    """float32 or int16 samples [T] or [T, channels] at ``sample_rate`` Hz as a WAV file."""
    if samples.dtype.name not in _WAV_FORMATS:
        raise InvalidRequest(f"{field}: expected samples of float32 or int16, got {samples.dtype}")
    num_channels = samples.shape[1] if samples.ndim == 2 else 1
    if samples.ndim not in (1, 2) or not 1 <= num_channels <= MAX_AUDIO_CHANNELS or samples.size == 0:
        raise InvalidRequest(
            f"{field}: expected samples of shape [T] or [T, channels] with at most "
            f"{MAX_AUDIO_CHANNELS} channels, got {samples.shape}"
        )
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | np.integer):
        raise InvalidRequest(f"{field}: expected a whole sample rate in Hz, got {sample_rate!r}")
    width = samples.dtype.itemsize
    frame_bytes = width * num_channels
    if not 1 <= sample_rate <= _MAX_RIFF_BYTES // frame_bytes:
        raise InvalidRequest(f"{field}: a sample rate of {sample_rate} Hz is out of range")
    if samples.nbytes > _MAX_RIFF_BYTES - 64:
        raise InvalidRequest(f"{field}: {samples.nbytes} bytes of samples are more than a WAV file holds")
    data = samples.astype(samples.dtype.newbyteorder("<"), order="C", copy=False).tobytes()
    rate = int(sample_rate)
    layout = struct.pack(
        "<HHIIHH",
        _WAV_FORMATS[samples.dtype.name],
        num_channels,
        rate,
        rate * frame_bytes,
        frame_bytes,
        8 * width,
    )
    if samples.dtype.kind == "f":  # other formats than PCM carry an extension size and a fact chunk
        layout += struct.pack("<H", 0)
        body = _riff_chunk(b"fmt ", layout) + _riff_chunk(b"fact", struct.pack("<I", samples.shape[0]))
    else:
        body = _riff_chunk(b"fmt ", layout)
    return _riff_chunk(b"RIFF", b"WAVE" + body + _riff_chunk(b"data", data))


def _file_bytes(value: object, field: str, fetch: Fetch | None) -> bytes | None:
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
    elif isinstance(value, str) and is_url(value):
        if fetch is None:
            raise InvalidRequest(
                f"{field}: is a URL; a client fetches them only with fetch_urls=True (minicpmo: --fetch-urls)"
            )
        content = fetch(value, field)
    elif isinstance(value, str) and value.startswith("data:"):
        content = value.encode()
    elif isinstance(value, str | os.PathLike):
        try:
            content = Path(value).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidRequest(f"{field}: cannot read {str(value)[:200]!r}: {reason}") from None
    else:
        return None
    if not content:
        raise InvalidRequest(f"{field}: is empty")
    return content


def _save_png(image: Any, field: str) -> bytes:
    buffer = io.BytesIO()
    try:
        # Pillow leaves out the orientation a camera noted unless it is handed over, and the picture
        # would arrive turned.
        read_exif: Callable[[], Any] | None = getattr(image, "getexif", None)
        exif = read_exif() if read_exif is not None else None
        turned = exif is not None and exif.get(_EXIF_ORIENTATION, 1) != 1
        options = {"exif": exif} if turned else {}
        image.save(buffer, format="PNG", compress_level=1, **options)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{field}: cannot be saved as PNG: {error}") from None
    return buffer.getvalue()


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _riff_chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
