"""Which CUDA graphs a mix of images and recordings needs: ``minicpmo-triton shapes``.

An encoder's graph key is its batch and the length of what is stacked in it: slices of equal patch
count, or chunks of equal frame count, in batches of powers of two up to 16. The figures here are those
of requests that arrive alone; requests that arrive together may form larger batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minicpmo_triton import schema
from minicpmo_triton.encoders.batching import plan_batches
from minicpmo_triton.errors import ConfigError
from minicpmo_triton.media.audio import num_audio_tokens
from minicpmo_triton.media.slicing import plan_slices

#: Triton sends a warm-up sample this often; the default admission captures on the second call.
WARMUP_COUNT = 2


@dataclass(frozen=True)
class ImageSize:
    """Pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"image {self.width}x{self.height}"


@dataclass(frozen=True)
class Clip:
    """Seconds of audio."""

    seconds: float

    def __str__(self) -> str:
        return f"audio {self.seconds:g} s"


@dataclass(frozen=True)
class Key:
    """One graph: ``batch`` pieces of ``length`` patches or mel frames each."""

    model: str
    batch: int
    length: int

    def __str__(self) -> str:
        unit = "patches" if self.model == schema.VISION_ENCODER.name else "frames"
        return f"{self.batch} x {self.length} {unit}"


def parse_image_size(text: str) -> ImageSize:
    """``WIDTHxHEIGHT``; :class:`ConfigError` otherwise."""
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text):
        raise ConfigError(f"--image {text}: expected WIDTHxHEIGHT in pixels, such as 1344x1344")
    width, height = text.split("x")
    return ImageSize(int(width), int(height))


def parse_seconds(text: str) -> Clip:
    """A positive number of seconds that gives at least one embedding row; :class:`ConfigError` otherwise."""
    try:
        clip = Clip(float(text))
        usable = 0 < clip.seconds < float("inf") and bool(chunk_lengths(clip))
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--audio {text}: expected seconds, at least 0.09")
    return clip


def slice_grids(image: ImageSize, max_slice_nums: int) -> list[tuple[int, int]]:
    """Rows and columns of patches of the whole picture and then of each slice."""
    plan = plan_slices(image.width, image.height, max_slice_nums)
    grids = [(plan.source[1] // schema.PATCH_SIZE, plan.source[0] // schema.PATCH_SIZE)]
    if plan.rows:
        rows = plan.refined[1] // plan.rows // schema.PATCH_SIZE
        columns = plan.refined[0] // plan.columns // schema.PATCH_SIZE
        grids += [(rows, columns)] * (plan.rows * plan.columns)
    return grids


def chunk_lengths(clip: Clip) -> list[int]:
    """Mel frames of each chunk of 30 s; a tail too short for one embedding row is dropped."""
    full, rest = divmod(-(-round(clip.seconds * 16000) // 160), schema.MAX_MEL_FRAMES)
    lengths = [schema.MAX_MEL_FRAMES] * full + [rest]
    return [length for length in lengths if length and num_audio_tokens(length) > 0]


def keys(request: ImageSize | Clip, max_slice_nums: int) -> list[Key]:
    """The graphs one request uses, sent alone, in the order of its calls."""
    if isinstance(request, ImageSize):
        model = schema.VISION_ENCODER.name
        lengths = [rows * columns for rows, columns in slice_grids(request, max_slice_nums)]
    else:
        model, lengths = schema.AUDIO_ENCODER.name, chunk_lengths(request)
    return [Key(model, len(batch), lengths[batch[0]]) for batch in plan_batches(lengths)]


def report(images: Sequence[ImageSize], clips: Sequence[Clip], max_slice_nums: int) -> str:
    """A line per request with its keys, and a line per encoder with the number of graphs."""
    lines = []
    needed: dict[str, dict[Key, None]] = {}
    requests: tuple[ImageSize | Clip, ...] = (*images, *clips)
    for request in requests:
        own = keys(request, max_slice_nums)
        lines.append(f"{request}: {', '.join(map(str, own))}")
        for key in own:
            needed.setdefault(key.model, {})[key] = None
    for model, distinct in needed.items():
        lines.append(f"{model} needs encoder_cuda_graph_max_graphs = {len(distinct)} for all of these")
    return "\n".join(lines)


def _warmup_inputs(
    request: ImageSize | Clip, max_slice_nums: int
) -> Iterator[tuple[schema.Tensor, NDArray[Any]]]:
    if isinstance(request, ImageSize):
        grids = np.array(slice_grids(request, max_slice_nums), np.int32)
        num_patches = int(grids.prod(axis=1).sum())
        yield schema.PATCHES, np.full((num_patches, schema.PATCH_VALUES), 128, np.uint8)
        yield schema.GRID_SIZES, grids
    else:
        lengths = np.array(chunk_lengths(request), np.int32)
        yield schema.MEL, np.zeros((int(lengths.sum()), schema.MEL_BINS), np.float32)
        yield schema.MEL_LENGTHS, lengths


def write_warmup(
    repository: Path, images: Sequence[ImageSize], clips: Sequence[Clip], max_slice_nums: int
) -> str:
    """Write each request's inputs under ``<encoder>/warmup`` and return the config.pbtxt lines for them."""
    sections = []
    by_model: tuple[tuple[schema.Model, Sequence[ImageSize | Clip]], ...] = (
        (schema.VISION_ENCODER, images),
        (schema.AUDIO_ENCODER, clips),
    )
    for model, requests in by_model:
        samples = [_write_sample(repository / model.name, request, max_slice_nums) for request in requests]
        if samples:
            body = ",\n".join(samples)
            sections.append(f"# {model.name}/config.pbtxt\nmodel_warmup [\n{body}\n]")
    return "\n".join(sections)


def _write_sample(folder: Path, request: ImageSize | Clip, max_slice_nums: int) -> str:
    name = str(request).replace(" ", "_")
    lines = [f'  {{ name: "{name}" batch_size: 1 count: {WARMUP_COUNT}']
    (folder / "warmup").mkdir(parents=True, exist_ok=True)
    for tensor, values in _warmup_inputs(request, max_slice_nums):
        file = folder / "warmup" / f"{name}_{tensor.name}"
        file.write_bytes(values.tobytes())
        dims = ", ".join(map(str, values.shape))
        lines.append(
            f'    inputs {{ key: "{tensor.name}" value {{ data_type: TYPE_{tensor.dtype} '
            f'dims: [ {dims} ] input_data_file: "{file.name}" }} }}'
        )
    return "\n".join([*lines, "  }"])
