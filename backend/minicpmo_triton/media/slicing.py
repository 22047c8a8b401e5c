"""Pictures -> uint8 patches, sliced as MiniCPM-V slices.

A picture larger than ``scale_resolution`` squared is encoded twice: as a whole, scaled down to about
that area, and as a grid of up to ``max_slice_nums`` slices of about that area each. The algorithm is
the one of the LLaVA-UHD and MiniCPM-V papers (adaptive visual encoding). Pixels stay uint8; the encoder
normalises them on its device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minicpmo_triton.media.resize import (
    ROWS_AT_ONCE,
    Taps,
    bicubic_taps,
    decoded_rows,
    pixels_of,
    resize_columns,
    resize_rows,
    upright_size,
)
from minicpmo_triton.schema import PATCH_SIZE, PATCH_VALUES

#: Pixels that one task takes: smaller tasks spend more on handing Python's lock around than they win.
_TASK_PIXELS = 1 << 18


@dataclass(frozen=True)
class SlicePlan:
    """Sizes in pixels as (width, height), multiples of the patch size.

    ``rows`` and ``columns`` are 0 when the picture is not sliced; ``refined`` is then (0, 0), else the
    size of all slices together.
    """

    source: tuple[int, int]
    rows: int = 0
    columns: int = 0
    refined: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ImagePatches:
    """The whole picture and then its ``rows`` x ``columns`` slices, row by row.

    ``patches`` uint8 [P, 588], each row 3x14x14 channel-major; ``grid_sizes`` int32 [S, 2] rows and
    columns of patches per slice, products summing to P.
    """

    patches: NDArray[np.uint8]
    grid_sizes: NDArray[np.int32]
    rows: int
    columns: int


def plan_slices(width: int, height: int, max_slice_nums: int, scale_resolution: int = 448) -> SlicePlan:
    """How a picture of ``width`` x ``height`` pixels is resized and cut.

    The number of slices is about the picture's area in units of ``scale_resolution`` squared, at most
    ``max_slice_nums``; among grids of that many, one fewer and one more, the one whose aspect ratio is
    nearest the picture's (in logarithms; the first on a tie, narrower grids first) is taken.
    """
    num_ideal = min(math.ceil(width * height / scale_resolution**2), max_slice_nums)
    if num_ideal <= 1:
        return SlicePlan(source=_scaled_size(width, height, scale_resolution))
    aspect = math.log(width / height)
    columns, rows = min(
        _grids(num_ideal, max_slice_nums), key=lambda grid: abs(aspect - math.log(grid[0] / grid[1]))
    )
    cell_width = _round_to_multiple(width, columns) / columns
    cell_height = _round_to_multiple(height, rows) / rows
    cell = _scaled_size(cell_width, cell_height, scale_resolution)
    return SlicePlan(
        # More than one slice means more area than scale_resolution squared, so this only scales down.
        source=_scaled_size(width, height, scale_resolution),
        rows=rows,
        columns=columns,
        refined=(cell[0] * columns, cell[1] * rows),
    )


def _grids(num_ideal: int, max_slice_nums: int) -> Iterator[tuple[int, int]]:
    """(columns, rows) of every factor pair of the slice counts near ``num_ideal``."""
    for num_slices in (num_ideal - 1, num_ideal, num_ideal + 1):
        if 1 < num_slices <= max_slice_nums:
            for columns in range(1, num_slices + 1):
                if num_slices % columns == 0:
                    yield columns, num_slices // columns


def _scaled_size(width: float, height: float, scale_resolution: int) -> tuple[int, int]:
    """The size of the same aspect ratio and an area near ``scale_resolution`` squared, in patches."""
    aspect = width / height
    scaled_height = int(scale_resolution / math.sqrt(aspect))
    scaled_width = int(scaled_height * aspect)
    return _round_to_multiple(scaled_width, PATCH_SIZE), _round_to_multiple(scaled_height, PATCH_SIZE)


def _round_to_multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def slice_image(
    image: Image.Image, max_slice_nums: int, scale_resolution: int = 448, pool: Executor | None = None
) -> ImagePatches:
    """Resize an RGB image by :func:`plan_slices` (bicubic) and cut it into patches.

    The work runs in pieces on ``pool``, whose tasks must not call this function in turn; the result does
    not depend on it.
    """
    image.load()
    return Slicing(image, 1, max_slice_nums, scale_resolution, pool).finish()


def compile_kernels() -> None:
    """Compile what this module runs, about 3 s once a process; otherwise the first picture waits."""
    for orientation in (1, 6):  # pixels as they lie in memory, and turned
        Slicing(Image.new("RGB", (640, 480)), orientation, 9, 448, None).finish()


@dataclass(frozen=True)
class _Layout:
    """The size to resize to, width and height in pixels, how, and the slices it is cut into."""

    size: tuple[int, int]
    rows: int
    columns: int
    across: Taps
    down: Taps

    @classmethod
    def of(cls, source: tuple[int, int], size: tuple[int, int], rows: int, columns: int) -> _Layout:
        across, down = bicubic_taps(source[0], size[0]), bicubic_taps(source[1], size[1])
        return cls(size, rows, columns, across, down)


@dataclass(frozen=True)
class _Strip:
    """Some rows of patches of a layout: from the first, to before the second of ``patch_rows``."""

    layout: _Layout
    narrowed: NDArray[np.uint32]  # [height of the picture, width of the layout]
    patches: NDArray[np.uint8]  # [P, 588]: all of the layout's
    patch_rows: tuple[int, int]

    @property
    def num_rows_read(self) -> int:
        """Rows of ``narrowed``, from the top, that are not read beyond."""
        last = self.patch_rows[1] * PATCH_SIZE - 1
        num_taps = self.layout.down.weights.shape[1] or 1
        return min(int(self.layout.down.first[last]) + num_taps, len(self.narrowed))


class Slicing:
    """A picture on its way to patches: either pass does what it can with the rows that are there."""

    def __init__(
        self,
        image: Image.Image,
        orientation: int,
        max_slice_nums: int,
        scale_resolution: int,
        pool: Executor | None,
    ) -> None:
        self.image = image
        self._orientation = orientation
        size = upright_size(image, orientation)
        width, self._height = size
        plan = plan_slices(*size, max_slice_nums, scale_resolution)
        self._layouts = [_Layout.of(size, plan.source, 1, 1)]
        if plan.rows:
            self._layouts.append(_Layout.of(size, plan.refined, plan.rows, plan.columns))
        grids = [_patch_grid(layout) for layout in self._layouts for _ in range(layout.rows * layout.columns)]
        patches = np.empty((sum(math.prod(grid) for grid in grids), PATCH_VALUES), np.uint8)
        self._result = ImagePatches(patches, np.array(grids, np.int32), plan.rows, plan.columns)
        self._narrowed = [np.empty((self._height, layout.size[0]), np.uint32) for layout in self._layouts]
        strips: list[_Strip] = []
        start = 0
        for layout, narrowed in zip(self._layouts, self._narrowed, strict=True):
            end = start + math.prod(layout.size) // PATCH_SIZE**2
            strips += _strips(layout, narrowed, patches[start:end])
            start = end
        self._strips = deque(sorted(strips, key=lambda strip: strip.num_rows_read))
        self._band_height = _rows_of_a_task(width, ROWS_AT_ONCE)
        self._was_clear: bool | None = None  # the picture's memory, before the first row
        self._num_taken = 0  # rows
        self._bands: deque[tuple[int, Future[None]]] = deque()  # with the row after their last
        self._writes: list[Future[None]] = []
        self._pool = pool

    def take_decoded(self) -> None:
        """Begin with the bands whose rows the decoder, which waits meanwhile, has written."""
        if self._was_clear is None:
            self._was_clear = not decoded_rows(self.image, 0, self._height).any()
        while self._was_clear and self._num_taken < self._height:
            end = self._next_end()
            if not decoded_rows(self.image, end - 1, end)[0]:
                break
            self._take()
        while self._bands and self._bands[0][1].done():
            self._write_below(*self._bands.popleft())

    def cancel(self) -> None:
        """Give up what has not begun."""
        for future in (*(band for _, band in self._bands), *self._writes):
            future.cancel()

    def finish(self) -> ImagePatches:
        """The patches, once all of the picture is there."""
        while self._num_taken < self._height:
            self._take()
        while self._bands:
            self._write_below(*self._bands.popleft())
        for write in self._writes:
            write.result()
        return self._result

    def _next_end(self) -> int:
        return min(self._num_taken + self._band_height, self._height)

    def _take(self) -> None:
        """Begin the first pass over the next band."""
        top, self._num_taken = self._num_taken, self._next_end()
        task = partial(self._narrow, top, self._num_taken)
        self._bands.append((self._num_taken, self._begin(task)))

    def _narrow(self, top: int, bottom: int) -> None:
        """The first pass over some rows, for each layout."""
        pixels = pixels_of(self.image, top, bottom, self._orientation)
        for layout, narrowed in zip(self._layouts, self._narrowed, strict=True):
            resize_rows(pixels, layout.across, narrowed[top:bottom])

    def _write_below(self, end: int, band: Future[None]) -> None:
        """Wait for a band, then begin the second pass where it reads no rows from ``end`` on."""
        band.result()
        while self._strips and self._strips[0].num_rows_read <= end:
            self._writes.append(self._begin(partial(_write, self._strips.popleft())))

    def _begin(self, task: Callable[[], None]) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(task)
        task()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _rows_of_a_task(width: int, unit: int) -> int:
    """Rows of a picture that one task takes: about ``_TASK_PIXELS``, a multiple of ``unit``."""
    return max(_TASK_PIXELS // width // unit, 1) * unit


def _strips(layout: _Layout, narrowed: NDArray[np.uint32], patches: NDArray[np.uint8]) -> list[_Strip]:
    num_rows = layout.size[1] // PATCH_SIZE
    step = _rows_of_a_task(layout.size[0], PATCH_SIZE) // PATCH_SIZE
    return [
        _Strip(layout, narrowed, patches, (first, min(first + step, num_rows)))
        for first in range(0, num_rows, step)
    ]


def _write(strip: _Strip) -> None:
    """The second pass, for the patches of ``strip``."""
    grid = (strip.layout.rows, strip.layout.columns)
    resize_columns(strip.narrowed, strip.layout.down, strip.patches, grid, strip.patch_rows)


def _patch_grid(layout: _Layout) -> tuple[int, int]:
    """Rows and columns of patches in each slice."""
    width, height = layout.size
    return height // layout.rows // PATCH_SIZE, width // layout.columns // PATCH_SIZE
