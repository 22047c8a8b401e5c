"""Video files as FFmpeg may see them: whole, in memory, and nothing beside them.

FFmpeg takes what is left of a truncated file without a word, so sizes in the file's own structure are
held against the bytes that are there. What writers to a pipe leave open (sizes of zero or all ones)
counts as whole, and so does what is no known container: that is for the decoder to refuse.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import av
from av.container import InputContainer

from minicpmo_triton.errors import InvalidArgument

#: FFmpeg's names. None of these opens a second file or a network connection.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv"
_FORMATS_TEXT = "MP4, MOV, WebM, Matroska, AVI, MPEG, FLV"
_MAX_STREAMS = 64
_READ_BYTES = 1 << 20

_STREAMED_RIFF_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


@dataclass(frozen=True)
class VideoLimits:
    """``max_seconds`` of a video, ``max_pixels`` of a frame, threads of its decoder."""

    max_seconds: int
    max_pixels: int
    num_threads: int = 1


@contextmanager
def opened(field: str, data: bytes, limits: VideoLimits) -> Iterator[InputContainer]:
    """The container, closed afterwards; FFmpeg's errors become the client's."""
    options = {
        "format_whitelist": _FORMATS,
        "protocol_whitelist": "",
        "max_streams": str(_MAX_STREAMS),
        "max_pixels": str(limits.max_pixels),  # of the decoders that probe
    }
    try:
        # Titles in the file that are not UTF-8 are nobody's concern.
        container: InputContainer = av.open(
            io.BytesIO(data), "r", options=options, buffer_size=_READ_BYTES, metadata_errors="replace"
        )
    except (av.error.FFmpegError, ValueError):
        raise InvalidArgument(
            field, f"is malformed, truncated or not a video of a supported format ({_FORMATS_TEXT})"
        ) from None
    with container:
        try:
            yield container
        except av.error.MemoryError:
            raise
        except av.error.FFmpegError as error:
            raise InvalidArgument(field, "is truncated or corrupt") from error


def check_video_is_whole(field: str, data: bytes) -> None:
    """Raise :class:`InvalidArgument` for ``field`` when an MP4, AVI or Matroska file ends too early."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        end = _end_of_boxes(data)
    elif data[:4] == b"RIFF":
        (size,) = struct.unpack_from("<I", data.ljust(8, b"\0"), 4)
        end = 0 if size in _STREAMED_RIFF_SIZES else 8 + size
    elif data[:4] == _EBML:
        end = _end_of_segment(data)
    else:
        return
    if end > len(data):
        raise InvalidArgument(field, f"is truncated: its header announces {end} bytes, {len(data)} are there")


def _end_of_boxes(data: bytes) -> int:
    """Where the last box of an MP4 or QuickTime file ends; a size of 0 means the end of the file."""
    position = 0
    while position + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, position)
        if size == 1 and position + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, position + 8)
        if size < 8:
            return 0
        position += size
    return position


def _end_of_segment(data: bytes) -> int:
    """Where the first segment of a Matroska or WebM file ends; 0 when its size is left open."""
    size, position = _ebml_size(data, 4)
    position += size or 0
    if data[position : position + 4] != _SEGMENT:
        return 0
    size, position = _ebml_size(data, position + 4)
    return 0 if size is None else position + size


def _ebml_size(data: bytes, position: int) -> tuple[int | None, int]:
    """An EBML size (None: unknown) and the position behind it."""
    length = 9 - data[position].bit_length() if position < len(data) else 1
    if length > 8:
        return None, position + 1
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(data[position : position + length], "big") & unknown
    return None if size == unknown else size, position + length
