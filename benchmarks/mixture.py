"""The requests of the ``traffic`` benchmark: what sizes of pictures and lengths of audio people send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minicpmo_triton import schema
from minicpmo_triton.encoders.batching import AudioItem, VisionItem
from minicpmo_triton.shapes import Clip, ImageSize, Key, chunk_lengths, keys, slice_grids

#: Share of the traffic, and the sizes it takes turns in at random.
FIXED_SIZES = (
    (0.25, [(4032, 3024), (3024, 4032)]),  # photographs of a phone
    (0.15, [(1920, 1080), (2560, 1440), (1170, 2532), (1080, 2400)]),  # screenshots
    (0.10, [(1344, 1344), (1024, 1024)]),  # generated or prepared
    (0.20, [(448, 448), (512, 512), (224, 224)]),  # thumbnails
)  # the rest are pictures from the web
WEB_SIDES = (160, 2400)  # pixels of the longer side, log-uniform
WEB_ASPECTS = (1 / 2, 2)  # log-uniform
#: Share of the traffic, and seconds of audio.
FIXED_SECONDS = (
    (0.15, [30.0]),  # chunks of longer recordings
    (0.25, [1.0, 2.0, 3.0, 5.0, 10.0]),  # cut by an application
)  # the rest are utterances of any length
UTTERANCE_SECONDS = (0.5, 30.0)  # log-uniform


def image_sizes(count: int, seed: int) -> list[ImageSize]:
    """``count`` sizes in random order, the same for the same seed."""
    random = np.random.default_rng(seed)
    sizes = []
    for _ in range(count):
        fixed = _drawn(FIXED_SIZES, random)
        if fixed is None:
            longer = _log_uniform(WEB_SIDES, random)
            aspect = _log_uniform(WEB_ASPECTS, random)
            fixed = (round(longer * min(1, aspect)), round(longer / max(1, aspect)))
        sizes.append(ImageSize(*fixed))
    return sizes


def clips(count: int, seed: int) -> list[Clip]:
    """``count`` lengths of audio in random order, the same for the same seed."""
    random = np.random.default_rng(seed)
    return [
        Clip(_drawn(FIXED_SECONDS, random) or _log_uniform(UTTERANCE_SECONDS, random)) for _ in range(count)
    ]


def _drawn(shares: Sequence[tuple[float, Sequence[Any]]], random: np.random.Generator) -> Any:
    """One of a group's values, the group by its share; ``None`` for the share that no group has."""
    place = random.uniform()
    for share, values in shares:
        if place < share:
            return values[random.integers(len(values))]
        place -= share
    return None


def _log_uniform(bounds: tuple[float, float], random: np.random.Generator) -> float:
    return float(np.exp(random.uniform(*np.log(bounds))))


@dataclass(frozen=True)
class Request:
    """One request on the host, and the graphs it would use."""

    item: Any
    keys: tuple[Key, ...]


def vision_requests(count: int, seed: int, max_slice_nums: int) -> list[Request]:
    """Pictures of :func:`image_sizes`; all view one array of random patches."""
    sizes = image_sizes(count, seed)
    grids = [slice_grids(size, max_slice_nums) for size in sizes]
    counts = [sum(rows * columns for rows, columns in each) for each in grids]
    patches = np.random.default_rng(seed).integers(0, 256, (max(counts), schema.PATCH_VALUES), dtype=np.uint8)
    return [
        Request(VisionItem(patches[:num], np.array(each, dtype=np.int32)), tuple(keys(size, max_slice_nums)))
        for size, each, num in zip(sizes, grids, counts, strict=True)
    ]


def audio_requests(count: int, seed: int, max_slice_nums: int) -> list[Request]:
    """Recordings of :func:`clips`; all view one array of random mel frames."""
    lengths = [(clip, chunk_lengths(clip)) for clip in clips(count, seed)]
    random = np.random.default_rng(seed)
    mel = random.standard_normal((schema.MAX_MEL_FRAMES, schema.MEL_BINS), dtype=np.float32)
    return [
        Request(
            AudioItem(mel[: sum(each)], np.array(each, dtype=np.int32)), tuple(keys(clip, max_slice_nums))
        )
        for clip, each in lengths
    ]


def best_hit_rate(requests: Sequence[Request], max_graphs: int) -> float:
    """Share of the calls that the ``max_graphs`` most frequent keys have, their first two calls included."""
    counts = Counter(key for request in requests for key in request.keys)
    return sum(count for _, count in counts.most_common(max_graphs)) / counts.total()
