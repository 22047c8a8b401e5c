"""Pillow's bicubic resizing of RGB pictures, rows first, bit for bit, a part of a picture at a time.

The published preprocessing resizes with Pillow, so its rounding is part of the model: weights in 22-bit fixed
point, rows first, rounded to bytes, then columns. (Pillow 13 takes columns first for tall pictures; two
calls, one for each direction, give these pixels in any version.) The same integers come out here several
times as fast: compiled by Numba for the processor at hand, without Python's lock, and the second pass writes
patches instead of a picture. Neither pass looks across its own direction, so bands of a picture may run side
by side.

Arrays: H x W pixels in, h x w out, K taps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minicpmo_triton.compiled import compiled
from minicpmo_triton.schema import PATCH_SIZE

if TYPE_CHECKING:
    from PIL._imaging import ImagingCore

#: Rows that the first pass takes together; bands of a multiple of it waste nothing.
ROWS_AT_ONCE = 16

_WEIGHT_BITS = 22
_HALF = 1 << (_WEIGHT_BITS - 1)
#: Taps are added this many at a time.
_UNROLL = 4


class Taps(NamedTuple):
    """How one direction is resized; no taps (K = 0) where the length stays."""

    first: NDArray[np.int32]  # [n]: source index of the first tap of each result
    weights: NDArray[np.int32]  # [n, K]: fixed point, zeros behind the last tap


@lru_cache(maxsize=32)  # 3 MB at most, for the longest side there can be
def bicubic_taps(length: int, new_length: int) -> Taps:
    """Weights of Pillow's bicubic filter (a = -0.5), widened by the scale where it shrinks."""
    scale = length / new_length
    stretch = max(scale, 1.0)
    radius = 2.0 * stretch
    centre = (np.arange(new_length) + 0.5) * scale
    first = np.maximum((centre - radius + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + radius + 0.5).astype(np.int64), length) - first
    num_taps = 0 if length == new_length else -(-int(count.max()) // _UNROLL) * _UNROLL
    tap = np.arange(num_taps)
    weights = _cubic((tap + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= count[:, None]] = 0.0
    total = np.zeros(new_length)
    for column in weights.T:  # in Pillow's order: another one could round otherwise
        total += column
    scaled = weights / total[:, None] * (1 << _WEIGHT_BITS)
    taps = Taps(first.astype(np.int32), np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32))
    for array in taps:
        array.setflags(write=False)  # shared by every caller
    return taps


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


#: By EXIF orientation, views that turn pixels upright.
_UPRIGHT: dict[int, Callable[[NDArray[np.uint32]], NDArray[np.uint32]]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.T,
    6: lambda pixels: pixels[::-1].T,
    7: lambda pixels: pixels[::-1, ::-1].T,
    8: lambda pixels: pixels[:, ::-1].T,
}


def upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Width and height of a picture as it is to be seen."""
    return image.size if orientation < 5 else (image.height, image.width)


def pixels_of(image: Image.Image, top: int, bottom: int, orientation: int = 1) -> NDArray[np.uint32]:
    """Rows of an RGB picture as [bottom - top, W]: red, green, blue and padding are the bytes of an integer.

    The rows are those of the picture turned upright from its EXIF ``orientation``. A view of the picture
    where Pillow (11.2 or newer) has it in one piece, else of a copy. Rows of a picture that is being decoded
    are read as they are; see :func:`decoded_rows`.
    """
    turned = _UPRIGHT[orientation]
    whole = _view(image.im)
    if whole is not None:
        return turned(whole)[top:bottom]
    width, height = upright_size(image, orientation)
    if orientation in (3, 4, 7, 8):  # from the other end
        top, bottom = height - bottom, height - top
    box = (0, top, width, bottom) if orientation < 5 else (top, 0, bottom, width)
    band = _view(image.im.crop(box))
    if band is None:
        copy = image.crop(box)
        band = np.frombuffer(copy.tobytes("raw", "RGBX"), np.uint32).reshape(copy.height, copy.width)
    return turned(band)


def decoded_rows(image: Image.Image, top: int, bottom: int) -> NDArray[np.bool_]:
    """Which rows of an RGB picture have been decoded: Pillow sets the padding of every pixel that it writes.

    A new picture's memory is clear. All are false where Pillow does not show its memory (before 11.2).
    """
    last = _view(image.im.crop((image.width - 1, top, image.width, bottom)))
    return np.zeros(bottom - top, np.bool_) if last is None else last[:, 0] >> 24 == 255


class _ArrowArray(ctypes.Structure):
    """An array of the Arrow C data interface."""

    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


def _view(core: ImagingCore) -> NDArray[np.uint32] | None:
    """The memory of an RGB picture, which Pillow shows as an Arrow list of four bytes a pixel."""
    export = getattr(core, "__arrow_c_array__", None)
    if export is None:
        return None
    try:
        capsule = export()
    except ValueError:  # in several pieces, as pictures of more than 16 MiB are
        return None
    pixels = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    values = _ArrowArray.from_address(pixels.children[0])
    memory = (ctypes.c_uint32 * pixels.length).from_address(values.buffers[1])
    memory.owner = capsule  # which keeps the picture's memory
    view = np.frombuffer(memory, np.uint32).reshape(core.size[1], core.size[0])
    view.setflags(write=False)
    return view


def resize_rows(pixels: NDArray[np.uint32], taps: Taps, narrowed: NDArray[np.uint32]) -> None:
    """The first pass: ``pixels`` [H, W] -> ``narrowed`` [H, w]."""
    if taps.weights.shape[1]:
        _resize_rows(pixels, taps.first, taps.weights, narrowed)
    else:
        narrowed[...] = pixels


def resize_columns(
    narrowed: NDArray[np.uint32],
    taps: Taps,
    patches: NDArray[np.uint8],
    grid: tuple[int, int],
    patch_rows: tuple[int, int],
) -> None:
    """The second pass: ``narrowed`` [H, w] -> some of the picture's ``patches`` [P, 588].

    ``grid`` is the number of slices down and across, which follow one another row by row in ``patches``.
    Rows of patches from ``patch_rows[0]`` to before ``patch_rows[1]`` of the whole picture are written.
    """
    out = patches.view(np.uint16).reshape(-1, 3, PATCH_SIZE, PATCH_SIZE // 2)
    _resize_columns(narrowed.view(np.uint8), taps.first, taps.weights, out, *grid, *patch_rows)


@compiled
def _resize_rows(pixels, first, weights, narrowed):  # type: ignore[no-untyped-def]
    height, width = pixels.shape
    num_taps = weights.shape[1]
    # Sixteen rows side by side: every tap is then one multiplication of 64 neighbouring bytes. What is behind
    # the last pixel meets weights of zero.
    columns = np.zeros((width + num_taps, ROWS_AT_ONCE), np.uint32)
    values = columns.view(np.uint8)
    sums = np.empty(4 * ROWS_AT_ONCE, np.int32)
    results = np.empty(4 * ROWS_AT_ONCE, np.uint8)
    packed = results.view(np.uint32)
    for top in range(0, height, ROWS_AT_ONCE):
        num_rows = min(ROWS_AT_ONCE, height - top)
        for x in range(width):
            for row in range(num_rows):
                columns[x, row] = pixels[top + row, x]
        for x in range(first.size):
            sums[:] = _HALF
            for tap in range(0, num_taps, _UNROLL):
                source = first[x] + tap
                w0, w1, w2, w3 = (
                    weights[x, tap],
                    weights[x, tap + 1],
                    weights[x, tap + 2],
                    weights[x, tap + 3],
                )
                for lane in range(4 * ROWS_AT_ONCE):
                    sums[lane] += (
                        w0 * np.int32(values[source, lane])
                        + w1 * np.int32(values[source + 1, lane])
                        + w2 * np.int32(values[source + 2, lane])
                        + w3 * np.int32(values[source + 3, lane])
                    )
            for lane in range(4 * ROWS_AT_ONCE):
                results[lane] = min(max(sums[lane] >> _WEIGHT_BITS, 0), 255)
            for row in range(num_rows):
                narrowed[top + row, x] = packed[row]


@compiled
def _resize_columns(narrowed, first, weights, patches, rows, columns, begin, end):  # type: ignore[no-untyped-def]
    height = narrowed.shape[0]
    width = narrowed.shape[1] // 4
    num_taps = weights.shape[1]
    sums = np.empty(4 * width, np.int32)
    line = np.empty(4 * width, np.uint8)
    colours = np.empty((3, PATCH_SIZE, width), np.uint8)  # fourteen lines' red, their green, their blue
    pairs = colours.view(np.uint16)
    across = width // PATCH_SIZE // columns  # patches in a row of a slice
    down = first.size // PATCH_SIZE // rows
    for patch_row in range(begin, end):
        for y in range(PATCH_SIZE):
            target = patch_row * PATCH_SIZE + y
            if num_taps == 0:
                line[:] = narrowed[target]
            else:
                sums[:] = _HALF
                for tap in range(0, num_taps, _UNROLL):
                    w0, w1 = weights[target, tap], weights[target, tap + 1]
                    w2, w3 = weights[target, tap + 2], weights[target, tap + 3]
                    top = first[target] + tap  # rows behind the last one meet weights of zero
                    y0, y1 = min(top, height - 1), min(top + 1, height - 1)
                    y2, y3 = min(top + 2, height - 1), min(top + 3, height - 1)
                    for i in range(4 * width):
                        sums[i] += (
                            w0 * np.int32(narrowed[y0, i])
                            + w1 * np.int32(narrowed[y1, i])
                            + w2 * np.int32(narrowed[y2, i])
                            + w3 * np.int32(narrowed[y3, i])
                        )
                for i in range(4 * width):
                    line[i] = min(max(sums[i] >> _WEIGHT_BITS, 0), 255)
            for x in range(width):
                colours[0, y, x] = line[4 * x]
                colours[1, y, x] = line[4 * x + 1]
                colours[2, y, x] = line[4 * x + 2]
        for column in range(across * columns):
            slice_index = patch_row // down * columns + column // across
            patch = (slice_index * down + patch_row % down) * across + column % across
            for colour in range(3):
                for y in range(PATCH_SIZE):
                    for x in range(PATCH_SIZE // 2):
                        patches[patch, colour, y, x] = pairs[colour, y, column * (PATCH_SIZE // 2) + x]
