"""What is measured: both encoders with random weights, in our form and in the ordinary one, and examples.

Both forms hold the same weights, drawn in the type they run in; the float32 reference holds their exact
values.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.operations import audio_operations, vision_operations
from benchmarks.ordinary import OrdinaryAudio, OrdinaryVision, mel_batch, pixel_batch
from minicpmo_triton import schema
from minicpmo_triton.encoders import audio, random_weights, vision
from minicpmo_triton.encoders.audio import AudioModule, num_tokens
from minicpmo_triton.encoders.batching import AudioEncoder, AudioItem, VisionEncoder, VisionItem
from minicpmo_triton.encoders.vision import VisionModule
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import Forward, GraphDevice
from minicpmo_triton.graphs.policy import GraphSettings, Inputs
from minicpmo_triton.shapes import ImageSize, slice_grids

Item = TypeVar("Item", VisionItem, AudioItem)
#: A device for the graph adapter, in place of the real one; for tests.
Seam: TypeAlias = Callable[[], GraphDevice]

TINY_VISION = (
    vision.VisionConfig(hidden_size=128, query_num=8, drop_vision_last_layer=False),
    vision.TowerConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=980,
        patch_size=14,
    ),
)
TINY_AUDIO = (
    audio.AudioConfig(hidden_size=128, audio_pool_step=5, audio_chunk_length=1.0),
    audio.TowerConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80
    ),
)


@dataclass(frozen=True)
class Example(Generic[Item]):
    """One request. ``lengths`` are its patches per slice or mel frames per chunk."""

    name: str
    item: Item
    lengths: tuple[int, ...]
    profiled: bool = False


@dataclass(frozen=True)
class OrdinaryInput:
    """A padded batch, and on the host what else the ordinary module's forward takes."""

    batch: Tensor
    sizes: Sequence[Any]


Ordinary: TypeAlias = Callable[[OrdinaryInput], Tensor]


def call_name(inputs: Inputs, unit: str) -> str:
    """Batch and length of one call of the encoder's forward, such as ``8 x 1024 patches``."""
    rows = inputs["patches" if unit == "patches" else "mel"]
    assert rows is not None
    return f"{rows.shape[0]} x {rows.shape[1]} {unit}"


class Recorder:
    """Calls the forward, and keeps the inputs of each call: they are on the device already."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.calls: list[Inputs] = []

    def __call__(self, inputs: Inputs) -> Tensor:
        self.calls.append(inputs)
        return self.forward(inputs)


def _weights(module: nn.Module, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Fill ``module``, not yet prepared, and give its weights under the checkpoint's names."""
    random_weights._fill(module, dtype, device, seed)
    return dict(module.state_dict())


class Subject(ABC, Generic[Item]):
    """One encoder in its forms. ``module`` is ours, prepared."""

    name: str
    unit: str
    module: nn.Module
    _ordinary_weights: dict[str, Tensor]

    @cached_property
    def num_weight_bytes(self) -> int:
        """What any forward pass has to read."""
        return sum(weight.nbytes for weight in self._ordinary_weights.values())

    @abstractmethod
    def encoder(self, wrap: Callable[[Forward], Forward] | None = None) -> Callable[[Item], Tensor]:
        """One request through the encoder as the server uses it, from host arrays to rows [N, H]."""

    @abstractmethod
    def ordinary(self, dtype: torch.dtype | None = None) -> Ordinary:
        """The ordinary module's forward, in ``dtype`` or as it is; its rows are [B, T, H], padded."""

    @abstractmethod
    def ordinary_input(self, item: Item) -> OrdinaryInput:
        """What a preprocessor hands the ordinary module: one padded batch in float32 on the host."""

    @abstractmethod
    def ordinary_rows(self, output: Tensor, lengths: Sequence[int]) -> Tensor:
        """The rows [N, H] that mean something, in the order of ours."""

    @abstractmethod
    def operations(self, lengths: Sequence[int], least: bool = False) -> int:
        """Floating-point operations; see :mod:`benchmarks.operations`."""

    @abstractmethod
    def examples(self, seed: int) -> list[Example[Item]]:
        """The requests of the ``encoders`` benchmark."""

    def _cast(self, dtype: torch.dtype | None) -> Mapping[str, Tensor]:
        weights = self._ordinary_weights
        return weights if dtype is None else {name: weight.to(dtype) for name, weight in weights.items()}


class VisionSubject(Subject[VisionItem]):
    name, unit = "vision", "patches"
    module: VisionModule

    def __init__(self, dtype: torch.dtype, device: torch.device, tiny: bool, seed: int) -> None:
        self._tiny = tiny
        self._config = TINY_VISION if tiny else random_weights.VISION
        with torch.device("meta"):
            module = VisionModule(*self._config)
        self._ordinary_weights = _weights(module, dtype, device, seed)
        self.module = module.prepare()

    def encoder(self, wrap: Callable[[Forward], Forward] | None = None) -> Callable[[VisionItem], Tensor]:
        encoder = VisionEncoder(self.module, wrap) if wrap else VisionEncoder(self.module)
        return lambda item: _only(encoder.encode([item]))

    def ordinary(self, dtype: torch.dtype | None = None) -> Ordinary:
        module = OrdinaryVision.of(self._cast(dtype), *self._config)
        return partial(_call_ordinary, module)

    def ordinary_input(self, item: VisionItem) -> OrdinaryInput:
        grids = [(rows, columns) for rows, columns in np.asarray(item.grid_sizes).tolist()]
        slices = _pieces(item.patches, [rows * columns for rows, columns in grids])
        return OrdinaryInput(pixel_batch(slices), grids)

    def ordinary_rows(self, output: Tensor, lengths: Sequence[int]) -> Tensor:
        return output.flatten(0, 1)

    def operations(self, lengths: Sequence[int], least: bool = False) -> int:
        return vision_operations(lengths, *self._config)

    def examples(self, seed: int) -> list[Example[VisionItem]]:
        """Slices of a square picture, two other patch counts, and a screenshot's mixture of two."""
        square = (4, 4) if self._tiny else (32, 32)
        others = [(3, 5)] if self._tiny else [(34, 30), (28, 25)]
        screenshot = [(4, 6), (5, 5)] if self._tiny else slice_grids(ImageSize(1920, 1080), 9)
        counts = (1, 2) if self._tiny else (1, 2, 4, 10)
        random = np.random.default_rng(seed)
        requests = [[square] * count for count in counts] + [[grid] for grid in others] + [screenshot]
        return [self._example(grids, random, profiled=index == 0) for index, grids in enumerate(requests)]

    def _example(
        self, grids: Sequence[tuple[int, int]], random: np.random.Generator, profiled: bool
    ) -> Example[VisionItem]:
        lengths = tuple(rows * columns for rows, columns in grids)
        patches = random.integers(0, 256, (sum(lengths), schema.PATCH_VALUES), dtype=np.uint8)
        item = VisionItem(patches, np.array(grids, dtype=np.int32))
        return Example(_example_name(lengths, self.unit), item, lengths, profiled)


class AudioSubject(Subject[AudioItem]):
    name, unit = "audio", "frames"
    module: AudioModule

    def __init__(self, dtype: torch.dtype, device: torch.device, tiny: bool, seed: int) -> None:
        self._tiny = tiny
        self._config = TINY_AUDIO if tiny else random_weights.AUDIO
        with torch.device("meta"):
            module = AudioModule(*self._config)
        self._ordinary_weights = _weights(module, dtype, device, seed)
        self.module = module.prepare()

    def encoder(self, wrap: Callable[[Forward], Forward] | None = None) -> Callable[[AudioItem], Tensor]:
        encoder = AudioEncoder(self.module, wrap) if wrap else AudioEncoder(self.module)
        return lambda item: _only(encoder.encode([item]))

    def ordinary(self, dtype: torch.dtype | None = None) -> Ordinary:
        module = OrdinaryAudio.of(self._cast(dtype), *self._config)
        return partial(_call_ordinary, module)

    def ordinary_input(self, item: AudioItem) -> OrdinaryInput:
        num_frames = np.asarray(item.mel_lengths).tolist()
        return OrdinaryInput(mel_batch(_pieces(item.mel, num_frames)), num_frames)

    def ordinary_rows(self, output: Tensor, lengths: Sequence[int]) -> Tensor:
        counts = [num_tokens(length, self._config[0].audio_pool_step) for length in lengths]
        return torch.cat([rows[:count] for rows, count in zip(output, counts, strict=True)])

    def operations(self, lengths: Sequence[int], least: bool = False) -> int:
        return audio_operations(lengths, *self._config, least=least)

    def examples(self, seed: int) -> list[Example[AudioItem]]:
        """Single chunks, batches of equal ones, and a padded pair."""
        if self._tiny:
            requests = [(20,), (100,), (50, 50), (120, 33)]
        else:
            requests = [(100,), (200,), (500,), (3000,), (500,) * 4, (3000,) * 4, (3000, 700)]
        random = np.random.default_rng(seed)
        return [
            Example(
                _example_name(lengths, self.unit),
                AudioItem(
                    random.standard_normal((sum(lengths), schema.MEL_BINS), dtype=np.float32),
                    np.array(lengths, dtype=np.int32),
                ),
                lengths,
                profiled=len(lengths) == 1 and lengths[0] == (20 if self._tiny else 3000),
            )
            for lengths in requests
        ]


def adapter_maker(
    device: torch.device,
    seam: Seam | None,
    on_capture: Callable[[float], None] | None = None,
    **settings: Any,
) -> Callable[[Forward], GraphAdapter]:
    """A wrapper that makes graph adapters; no memory floor, as what they take is what we measure."""
    chosen = GraphSettings(**{"min_free_bytes": 0, **settings})
    return lambda forward: GraphAdapter(forward, chosen, device, seam() if seam else None, on_capture)


def _call_ordinary(module: nn.Module, given: OrdinaryInput) -> Tensor:
    output: Tensor = module(given.batch, given.sizes)
    return output


def _pieces(rows: object, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """A request's host rows cut into its slices or chunks."""
    return torch.split(torch.as_tensor(rows), list(lengths))


def _example_name(lengths: Sequence[int], unit: str) -> str:
    """``10 x 1024 patches``, or ``1 x 1032 + 8 x 1020 patches`` of a mixture."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    return f"{' + '.join(f'{count} x {length}' for length, count in counts.items())} {unit}"


def _only(results: Sequence[Any]) -> Tensor:
    """The one request's rows; an error it got instead is raised."""
    [result] = results
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Tensor)
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both encoder benchmarks have."""
    parser.add_argument(
        "--encoder", choices=("vision", "audio", "both"), default="both", help="default: both"
    )
    parser.add_argument("--device", help="such as cuda:1 or cpu; default: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and values; default: 0")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny encoders and few calls, to try the benchmark on a CPU"
    )


def device_and_dtype(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """As the options say. On a GPU that device becomes the current one."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    dtype: torch.dtype = getattr(torch, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    return device, dtype


def subjects(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[int], Subject[Any]]]:
    """Makers of the encoders chosen, by name, from a seed; one encoder at a time should be measured."""
    kinds: dict[str, type[VisionSubject] | type[AudioSubject]] = {
        "vision": VisionSubject,
        "audio": AudioSubject,
    }
    return {
        name: partial(kind, dtype, device, arguments.tiny)
        for name, kind in kinds.items()
        if arguments.encoder in (name, "both")
    }
