"""Tensors as the bytes that both protocols carry."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minicpmo_client.errors import ServerError

_DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "INT32": "<i4",
    "UINT32": "<u4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}


def encode_input(value: Sequence[bytes] | bool) -> tuple[list[int], bytes]:
    """Shape and bytes of an input: a BOOL is one byte, a BYTES element follows its 32-bit length."""
    if isinstance(value, bool):
        return [1], struct.pack("?", value)
    return [len(value)], b"".join(part for item in value for part in (struct.pack("<I", len(item)), item))


def decode_tensor(datatype: str, shape: Sequence[int], raw: bytes) -> npt.NDArray[Any]:
    """A tensor from its bytes: BYTES as objects (bytes), BF16 as float32, which holds all its values.

    Raises:
        ServerError: bytes and shape do not fit, or the data type is none the server's models use.
    """
    try:
        if datatype == "BYTES":
            parts = _split(raw)
            items = np.empty(len(parts), dtype=np.object_)
            items[:] = parts
            return items.reshape(shape)
        if datatype == "BF16":
            upper = np.frombuffer(raw, "<u2").astype(np.uint32)
            return np.left_shift(upper, 16, out=upper).view(np.float32).reshape(shape)
        return np.frombuffer(raw, _DTYPES[datatype]).reshape(shape).copy()
    except (KeyError, ValueError, struct.error):
        raise ServerError(
            f"the server sent {len(raw)} bytes as a tensor of {datatype} {list(shape)}"
        ) from None


def _split(raw: bytes) -> list[bytes]:
    items, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4 + length
        if at > len(raw):
            raise ValueError("an element is cut off")
        items.append(raw[at - length : at])
    return items
