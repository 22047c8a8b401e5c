"""Encoders as the server uses them: many requests in, one result or error for each.

Slices (or audio chunks) of all requests are grouped by their length, stacked without padding into
batches whose sizes are powers of two, and sent through one callable: the module itself, or what ``wrap``
makes of it, such as a CUDA graph adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders.audio import AudioModule, num_positions, num_tokens, visible_ends
from minicpmo_triton.encoders.vision import MAX_SLICE_PATCHES, Grid, PositionCache, VisionModule
from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.schema import (
    GRID_SIZES,
    MAX_MEL_FRAMES,
    MEL,
    MEL_BINS,
    MEL_LENGTHS,
    PATCH_VALUES,
    PATCHES,
)

MAX_BATCH = 16

HostArray: TypeAlias = "NDArray[Any] | Tensor"  # a tensor on the CPU

Item = TypeVar("Item")


@dataclass(frozen=True)
class VisionItem:
    """One request's slices: patches uint8 [P, 588] and grid_sizes int32 [S, 2], both on the host."""

    patches: HostArray
    grid_sizes: HostArray


@dataclass(frozen=True)
class AudioItem:
    """One request's chunks: mel float32 [F, 80] and mel_lengths int32 [C], both on the host."""

    mel: HostArray
    mel_lengths: HostArray


@dataclass(frozen=True)
class Piece:
    """What is encoded as one: a slice's patches or a chunk's frames, a view of the request's memory."""

    rows: NDArray[Any]  # [N, 588] or [F, 80]
    grid: Grid = (0, 0)  # of a slice


def power_of_two_batches(count: int, max_batch: int = MAX_BATCH) -> list[int]:
    """Sizes that sum to ``count``, smallest first, each a power of two up to ``max_batch``: 11 -> 1, 2, 8.

    So few sizes occur that each can have its graph; and the device begins with the little that the host has
    gathered soon, while it gathers the rest.
    """
    full, rest = divmod(count, max_batch)
    digits = [1 << bit for bit in range(rest.bit_length()) if rest >> bit & 1]
    return digits + [max_batch] * full


def plan_batches(lengths: Sequence[int], max_batch: int = MAX_BATCH) -> list[list[int]]:
    """Indices of equal length together, in their order, cut by :func:`power_of_two_batches`."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    batches = []
    for group in groups.values():
        start = 0
        for size in power_of_two_batches(len(group), max_batch):
            batches.append(group[start : start + size])
            start += size
    return batches


def join_rows(
    batches: Sequence[Sequence[int]], outputs: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """Each request's rows [N, H] out of the batches' outputs.

    ``outputs[b]`` is [B, R, H] for the pieces ``batches[b]``; request r owns the next ``counts[r]`` (at
    least one) pieces. A result is a view where its pieces lie side by side in one output, else a copy.
    """
    place = {index: (b, row) for b, batch in enumerate(batches) for row, index in enumerate(batch)}
    results, start = [], 0
    for count in counts:
        runs: list[list[int]] = []  # batch, first row, row after the last
        for index in range(start, start + count):
            b, row = place[index]
            if runs and runs[-1][0] == b and runs[-1][2] == row:
                runs[-1][2] = row + 1
            else:
                runs.append([b, row, row + 1])
        parts = [outputs[b][first:end].flatten(0, 1) for b, first, end in runs]
        results.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        start += count
    return results


def _unwrapped(forward: Forward) -> Forward:
    return forward


class _Encoder(ABC, Generic[Item]):
    """What both encoders share. One caller at a time, and always on the same CUDA stream."""

    def __init__(self, module: nn.Module, hidden_size: int, wrap: Callable[[Forward], Forward]) -> None:
        weight = next(module.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.hidden_size = hidden_size
        self._empty = torch.empty((0, hidden_size), dtype=self.dtype, device=self.device)
        self._call = wrap(lambda inputs: module(**inputs))

    def encode(
        self, items: Sequence[Item], between: Callable[[], object] | None = None
    ) -> list[Tensor | InvalidArgument]:
        """Embedding rows [N, hidden_size] of each request, or what is wrong with it.

        ``between`` is called between two batches; it may encode other requests.

        The rows are contiguous, in the weights' type and on their device; they may share memory with
        those of other requests, and work on them may still be under way on the current stream.
        """
        with torch.inference_mode():
            pieces: list[Piece] = []
            results: list[Tensor | InvalidArgument] = [self._empty] * len(items)
            counts: dict[int, int] = {}  # request -> its pieces, where it has any
            for request, item in enumerate(items):
                try:
                    own = self._split(item)
                except InvalidArgument as error:
                    results[request] = error
                    continue
                if own:
                    counts[request] = len(own)
                    pieces += own
            batches = plan_batches([len(piece.rows) for piece in pieces])
            outputs: list[Tensor] = []
            for batch in batches:
                if outputs and between is not None:
                    between()
                outputs.append(self._call(self._inputs([pieces[index] for index in batch])))
            for request, rows in zip(counts, join_rows(batches, outputs, list(counts.values())), strict=True):
                results[request] = rows
            return results

    @abstractmethod
    def _split(self, item: Item) -> list[Piece]:
        """The request's pieces; :class:`InvalidArgument` where its tensors do not fit together."""

    @abstractmethod
    def _inputs(self, pieces: Sequence[Piece]) -> Mapping[str, Tensor]:
        """The module's inputs for pieces of equal length."""

    def _stacked(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
        """[B, N, …] on the device. One copy into pinned memory, one to the device, no waiting."""
        shape = (len(pieces), *pieces[0].rows.shape)
        host = torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        np.stack([piece.rows for piece in pieces], out=host.numpy())
        return host.to(self.device, non_blocking=True)


class VisionEncoder(_Encoder[VisionItem]):
    """Slices of many requests -> ``num_queries`` rows per slice."""

    def __init__(self, module: VisionModule, wrap: Callable[[Forward], Forward] = _unwrapped) -> None:
        """``module`` holds its weights and is prepared; ``wrap`` gets its forward once."""
        super().__init__(module, module.hidden_size, wrap)
        self._positions = PositionCache(module.grid_side, self.device)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        wrap: Callable[[Forward], Forward] = _unwrapped,
    ) -> VisionEncoder:
        """Load the tower and the resampler; :class:`CheckpointError` when they are not as expected."""
        return cls(VisionModule.from_checkpoint(checkpoint, dtype, device), wrap)

    def _split(self, item: VisionItem) -> list[Piece]:
        patches = _checked(PATCHES.name, item.patches, np.uint8, (None, PATCH_VALUES))
        sizes = _checked(GRID_SIZES.name, item.grid_sizes, np.int32, (None, 2))
        grids: list[Grid] = [(rows, columns) for rows, columns in sizes.tolist()]
        for index, (rows, columns) in enumerate(grids):
            if min(rows, columns) < 1 or rows * columns > MAX_SLICE_PATCHES:
                raise InvalidArgument(
                    GRID_SIZES.name,
                    f"slice {index} has {rows} x {columns} patches; both must be at least 1 and their"
                    f" product at most {MAX_SLICE_PATCHES}",
                )
        spans = _spans(GRID_SIZES.name, [rows * columns for rows, columns in grids], PATCHES.name, patches)
        return [Piece(patches[span], grid) for span, grid in zip(spans, grids, strict=True)]

    def _inputs(self, pieces: Sequence[Piece]) -> Mapping[str, Tensor]:
        position_ids, resampler_positions = self._positions.batch([piece.grid for piece in pieces])
        return {
            "patches": self._stacked(pieces, torch.uint8),
            "position_ids": position_ids,
            "resampler_positions": resampler_positions,
        }


class AudioEncoder(_Encoder[AudioItem]):
    """Chunks of many requests -> rows of 0.1 s each."""

    def __init__(self, module: AudioModule, wrap: Callable[[Forward], Forward] = _unwrapped) -> None:
        """``module`` holds its weights and is prepared; ``wrap`` gets its forward once."""
        super().__init__(module, module.hidden_size, wrap)
        self._pool_step = module.pool_step
        self._visible_ends = visible_ends(module.max_positions, module.block_positions).to(self.device)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        wrap: Callable[[Forward], Forward] = _unwrapped,
    ) -> AudioEncoder:
        """Load the tower and the projection; :class:`CheckpointError` when they are not as expected."""
        return cls(AudioModule.from_checkpoint(checkpoint, dtype, device), wrap)

    def _split(self, item: AudioItem) -> list[Piece]:
        mel = _checked(MEL.name, item.mel, np.float32, (None, MEL_BINS))
        lengths: list[int] = _checked(MEL_LENGTHS.name, item.mel_lengths, np.int32, (None,)).tolist()
        for index, length in enumerate(lengths):
            if not (length <= MAX_MEL_FRAMES and num_tokens(length, self._pool_step) >= 1):
                raise InvalidArgument(
                    MEL_LENGTHS.name,
                    f"chunk {index} has {length} frames; it takes {2 * self._pool_step - 1} to"
                    f" {MAX_MEL_FRAMES}",
                )
        return [Piece(mel[span]) for span in _spans(MEL_LENGTHS.name, lengths, MEL.name, mel)]

    def _inputs(self, pieces: Sequence[Piece]) -> Mapping[str, Tensor]:
        mel = self._stacked(pieces, torch.float32)
        return {"mel": mel, "visible_end": self._visible_ends[: num_positions(mel.shape[1])]}


def _checked(
    name: str, value: HostArray, dtype: type[np.generic], shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """``value`` as a numpy array, of exactly this type and shape (None is any length)."""
    array: NDArray[Any] = value.numpy() if isinstance(value, Tensor) else value
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        dims = ", ".join("any" if want is None else str(want) for want in shape)
        raise InvalidArgument(
            name,
            f"expected {np.dtype(dtype).name} of shape [{dims}], got {array.dtype.name} of shape"
            f" {list(array.shape)}",
        )
    return array


def _spans(name: str, lengths: Sequence[int], rows_name: str, rows: NDArray[Any]) -> list[slice]:
    """Consecutive spans of ``lengths`` that together are exactly ``rows``."""
    if sum(lengths) != len(rows):
        raise InvalidArgument(name, f"covers {sum(lengths)} rows, but {rows_name} has {len(rows)}")
    spans, start = [], 0
    for length in lengths:
        spans.append(slice(start, start + length))
        start += length
    return spans
