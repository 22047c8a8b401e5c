"""Many requests at once: planning, validation, and each request's own rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders.batching import (
    AudioEncoder,
    AudioItem,
    Forward,
    VisionEncoder,
    VisionItem,
    join_rows,
    plan_batches,
    power_of_two_batches,
)
from minicpmo_triton.errors import InvalidArgument


class Recorder:
    """A ``wrap`` that notes the inputs' shapes of every call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, tuple[int, ...]]] = []

    def __call__(self, forward: Forward) -> Forward:
        def call(inputs: Mapping[str, Tensor]) -> Tensor:
            assert torch.is_inference_mode_enabled()
            self.calls.append({name: tuple(tensor.shape) for name, tensor in inputs.items()})
            return forward(inputs)

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def vision(tiny_checkpoint: Path, recorder: Recorder) -> VisionEncoder:
    return VisionEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu", recorder)


@pytest.fixture
def audio(tiny_checkpoint: Path, recorder: Recorder) -> AudioEncoder:
    return AudioEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu", recorder)


def vision_item(grids: Sequence[tuple[int, int]], seed: int = 0) -> VisionItem:
    count = sum(map(math.prod, grids))
    patches = np.random.default_rng(seed).integers(0, 256, (count, 588), dtype=np.uint8)
    return VisionItem(patches, np.array(grids, np.int32).reshape(-1, 2))


def audio_item(lengths: Sequence[int], seed: int = 0) -> AudioItem:
    mel = np.random.default_rng(seed).standard_normal((sum(lengths), 80), dtype=np.float32)
    return AudioItem(mel, np.array(lengths, np.int32))


def rows(result: Tensor | InvalidArgument) -> Tensor:
    assert isinstance(result, Tensor), result
    assert result.is_contiguous()
    return result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_batches_are_the_binary_digits_before_the_full_ones() -> None:
    assert power_of_two_batches(0) == []
    assert power_of_two_batches(11) == [1, 2, 8]
    assert power_of_two_batches(37) == [1, 4, 16, 16]


@given(st.integers(0, 500), st.sampled_from([1, 2, 4, 8, 16]))
def test_batches_sum_up_and_are_powers_of_two(count: int, max_batch: int) -> None:
    sizes = power_of_two_batches(count, max_batch)
    assert sum(sizes) == count
    assert all(size & (size - 1) == 0 and 0 < size <= max_batch for size in sizes)
    assert sizes == sorted(sizes)


@given(st.lists(st.integers(1, 4), max_size=60))
def test_a_plan_covers_each_piece_once_and_never_mixes_lengths(lengths: list[int]) -> None:
    batches = plan_batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len({lengths[index] for index in batch}) == 1 for batch in batches)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), max_size=6))
def test_joined_rows_are_each_requests_own_in_order(requests: list[list[int]]) -> None:
    lengths = [length for request in requests for length in request]
    batches = plan_batches(lengths)
    # A row holds the index of its piece; a piece has as many rows as it is long.
    outputs = [
        torch.tensor(batch)[:, None, None].expand(-1, lengths[batch[0]], 2).contiguous() for batch in batches
    ]
    results = join_rows(batches, outputs, [len(request) for request in requests])
    index = 0
    for request, result in zip(requests, results, strict=True):
        expected = [piece for piece, length in enumerate(request, index) for _ in range(length)]
        assert result[:, 0].tolist() == expected
        assert result.is_contiguous()
        index += len(request)


def test_rows_of_one_batch_are_views() -> None:
    output = torch.zeros(4, 2, 3)
    first, second = join_rows([[0, 1, 2, 3]], [output], [1, 3])
    assert first.data_ptr() == output.data_ptr()
    assert second.data_ptr() == output[1].data_ptr()


def test_slices_of_several_requests_share_batches(vision: VisionEncoder, recorder: Recorder) -> None:
    items = [
        vision_item([(2, 3), (4, 4), (3, 2)], seed=1),
        vision_item([], seed=2),
        vision_item([(3, 2)] * 4 + [(4, 4)], seed=3),
        vision_item([(1, 6)], seed=4),
    ]
    together = [rows(result) for result in vision.encode(items)]
    patches = [call["patches"] for call in recorder.calls]
    assert patches == [(1, 6, 588), (2, 6, 588), (4, 6, 588), (2, 16, 588)]
    assert [len(result) for result in together] == [3 * 64, 0, 5 * 64, 64]
    del items[1], together[1]  # the one without slices
    for item, result in zip(items, together, strict=True):
        assert relative_error(rows(vision.encode([item])[0]), result) < 1e-6
        slices = np.split(item.patches, np.cumsum(item.grid_sizes.prod(1))[:-1])
        for grid, patch_rows, own in zip(item.grid_sizes, slices, result.split(64), strict=True):
            one = rows(vision.encode([VisionItem(patch_rows, grid[None])])[0])
            assert relative_error(one, own) < 1e-6


def test_chunks_of_several_requests_share_batches(audio: AudioEncoder, recorder: Recorder) -> None:
    items = [audio_item([300, 143], seed=1), audio_item([143] * 3, seed=2), audio_item([9], seed=3)]
    together = [rows(result) for result in audio.encode(items)]
    assert [call["mel"] for call in recorder.calls] == [(1, 300, 80), (4, 143, 80), (1, 9, 80)]
    assert [call["visible_end"] for call in recorder.calls] == [(150,), (72,), (5,)]
    assert [len(result) for result in together] == [30 + 14, 3 * 14, 1]
    for item, result in zip(items, together, strict=True):
        assert relative_error(rows(audio.encode([item])[0]), result) < 1e-6
        chunks = np.split(item.mel, np.cumsum(item.mel_lengths)[:-1])
        own = [rows(audio.encode([AudioItem(c, np.array([len(c)], np.int32))])[0]) for c in chunks]
        assert relative_error(torch.cat(own), result) < 1e-6


def test_requests_without_media_make_no_call(
    vision: VisionEncoder, audio: AudioEncoder, recorder: Recorder
) -> None:
    for result in (*vision.encode([vision_item([])] * 2), *audio.encode([audio_item([])])):
        assert rows(result).shape == (0, 128)
    assert vision.encode([]) == audio.encode([]) == []
    assert recorder.calls == []


def test_results_do_not_change_with_later_calls(vision: VisionEncoder) -> None:
    result = rows(vision.encode([vision_item([(4, 4)], seed=1)])[0])
    kept = result.clone()
    vision.encode([vision_item([(4, 4)], seed=2)])
    assert torch.equal(result, kept)


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_tensors_and_strides_are_taken(vision: VisionEncoder) -> None:
    item = vision_item([(2, 2)])
    expected = rows(vision.encode([item])[0])
    locked = item.patches.copy()
    locked.flags.writeable = False
    strided = np.repeat(item.patches, 2, axis=1)[:, ::2]
    for patches in (locked, strided, torch.from_numpy(item.patches)):
        (result,) = vision.encode([VisionItem(patches, torch.from_numpy(item.grid_sizes))])
        assert torch.equal(rows(result), expected)


PATCHES, GRIDS = np.zeros((6, 588), np.uint8), np.array([[2, 3]], np.int32)


@pytest.mark.parametrize(
    ("patches", "grids", "field"),
    [
        (PATCHES.astype(np.float32), GRIDS, "patches"),
        (PATCHES[:, :580], GRIDS, "patches"),
        (PATCHES[0], GRIDS, "patches"),
        (PATCHES, GRIDS.astype(np.int64), "grid_sizes"),
        (PATCHES, GRIDS[0], "grid_sizes"),
        (PATCHES[:5], GRIDS, "grid_sizes"),
        (PATCHES, GRIDS[:0], "grid_sizes"),
        (PATCHES, np.array([[2, 3], [0, 4]], np.int32), "grid_sizes"),
        (PATCHES, np.array([[-2, -3]], np.int32), "grid_sizes"),
        (PATCHES, np.array([[2**31 - 1, 2**31 - 1]], np.int32), "grid_sizes"),
        (np.zeros((4970, 588), np.uint8), np.array([[70, 71]], np.int32), "grid_sizes"),
    ],
)
def test_a_bad_vision_request_costs_only_itself(
    patches: np.ndarray, grids: np.ndarray, field: str, vision: VisionEncoder
) -> None:
    good = vision_item([(2, 3)])
    before, bad, after = vision.encode([good, VisionItem(patches, grids), good])
    assert isinstance(bad, InvalidArgument)
    assert bad.field == field
    assert relative_error(rows(before), rows(vision.encode([good])[0])) < 1e-6
    assert relative_error(rows(before), rows(after)) < 1e-6


MEL = np.zeros((20, 80), np.float32)


@pytest.mark.parametrize(
    ("mel", "lengths", "field"),
    [
        (MEL.astype(np.float64), [20], "mel"),
        (MEL[:, :79], [20], "mel"),
        (MEL, [10], "mel_lengths"),
        (MEL, [12, 8], "mel_lengths"),
        (MEL, [-1, 21], "mel_lengths"),
        (MEL, [0, 20], "mel_lengths"),
        (MEL, [[20]], "mel_lengths"),
        (np.zeros((3001, 80), np.float32), [3001], "mel_lengths"),
    ],
)
def test_a_bad_audio_request_costs_only_itself(
    mel: np.ndarray, lengths: list[int], field: str, audio: AudioEncoder
) -> None:
    good = audio_item([20])
    before, bad, after = audio.encode([good, AudioItem(mel, np.array(lengths, np.int32)), good])
    assert isinstance(bad, InvalidArgument)
    assert bad.field == field
    assert relative_error(rows(before), rows(after)) < 1e-6
