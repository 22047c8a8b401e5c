"""One media element of a request -> the bytes of its file.

An element is the file itself, its base64 text or a data URI. The three are told apart by what they
begin with: files of known formats have magic bytes, none of which is the base64 of another known
format, and what holds bytes that no text holds can only be a file.
"""

from __future__ import annotations

import binascii
import re

from minicpmo_triton.errors import InvalidArgument

_MAGIC = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG",
    b"GIF8",
    b"RIFF",  # WebP and WAV
    b"RF64",
    b"BM",
    b"II*\x00",  # TIFF
    b"MM\x00*",
    b"fLaC",
    b"OggS",
    b"ID3",  # MP3 with tags; without them it begins with 0xff, which is no text
)
_SNIFFED_BYTES = 64
_NOT_TEXT = re.compile(rb"[^\t\n\r\x20-\x7e]")
_NETPBM = re.compile(rb"P[1-6]\s")
_URL = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URI_HEADER = re.compile(rb"data:[^,]{0,256},", re.IGNORECASE)
_WHITE_SPACE = b" \t\r\n"
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")


def media_bytes(field: str, element: bytes, max_bytes: int) -> bytes:
    """The file bytes that ``element`` (file bytes, base64 or data URI) stands for.

    Raises :class:`InvalidArgument` for ``field`` when the element is empty, is none of the three, is a
    URL to fetch, or holds more than ``max_bytes``; that is known before anything is decoded.
    """
    if not element:
        raise InvalidArgument(field, "is empty")
    if element[:5].lower() == b"data:":
        return _decode_base64(field, _data_uri_payload(field, element), max_bytes)
    if _is_file(element[:_SNIFFED_BYTES]):
        _check_size(field, len(element), max_bytes)
        return element
    if _URL.match(element):
        raise InvalidArgument(
            field, "is a URL; the server fetches nothing, so send the file's bytes, base64 or a data URI"
        )
    return _decode_base64(field, element, max_bytes)


def _is_file(head: bytes) -> bool:
    return head.startswith(_MAGIC) or bool(_NETPBM.match(head)) or bool(_NOT_TEXT.search(head))


def _data_uri_payload(field: str, element: bytes) -> bytes:
    header = _DATA_URI_HEADER.match(element)
    if header is None:
        raise InvalidArgument(field, "is a data URI without a comma after its media type")
    if not header.group()[:-1].lower().endswith(b";base64"):
        raise InvalidArgument(field, "is a data URI that is not base64 (expected data:<type>;base64,<data>)")
    return element[header.end() :]


def _check_size(field: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidArgument(field, f"holds {num_bytes} bytes; at most {max_bytes} are allowed")


def _decode_base64(field: str, text: bytes, max_bytes: int) -> bytes:
    # Command-line tools wrap base64 at 76 columns, so white space is no error.
    if any(space in text for space in _WHITE_SPACE):
        text = text.translate(None, _WHITE_SPACE)
    _check_size(field, len(text) // 4 * 3 - text[-2:].count(b"="), max_bytes)
    if not text or len(text) % 4 or not _BASE64.fullmatch(text):
        raise InvalidArgument(field, "is neither a media file of a known format nor base64 nor a data URI")
    return binascii.a2b_base64(text)
