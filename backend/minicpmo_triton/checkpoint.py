"""Reads a MiniCPM-o checkpoint: ``config.json`` and safetensors by prefix, never any code in it.

The weights lie in one file (``model.safetensors``) or in shards that ``model.safetensors.index.json``
names. Files are opened lazily and only the tensors asked for are read, so an encoder's process never
touches the pages of the language model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minicpmo_triton.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DOWNLOADED_FILES = ("*.json", "*.txt", "*.jinja", "*.safetensors")

#: Buffers that some exports store beside the weights. Both are computed here, so they are left unread.
IGNORED_TENSORS = frozenset({"vpm.embeddings.position_ids", "resampler.pos_embed"})

#: How many names an error lists before it only counts.
LISTED_NAMES = 5

Section = TypeVar("Section")


def resolve_checkpoint(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one as it is, else a Hugging Face id, downloaded or cached.

    Only the top level's json, txt, jinja and safetensors files are fetched. HF_HUB_OFFLINE,
    HF_HOME and HF_TOKEN hold as everywhere. Raises :class:`CheckpointError` with the reason.
    """
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        return local
    if local.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
        raise CheckpointError(f"checkpoint {name_or_path!r}: no such folder, and not a Hugging Face id")
    import huggingface_hub  # here, because a local folder needs none of it and it is slow to import

    try:
        folder = huggingface_hub.snapshot_download(
            name_or_path, allow_patterns=list(DOWNLOADED_FILES), ignore_patterns=["*/*"]
        )
    except Exception as error:  # huggingface_hub lets its own, the HTTP client's and the OS's errors out
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        raise CheckpointError(
            f"checkpoint {name_or_path!r}: no such folder, and the Hugging Face Hub gave nothing"
            f"{offline}: {type(error).__name__}: {error}"
        ) from error
    return Path(folder)


class Checkpoint:
    """The files of one checkpoint folder. Reading config and tensor names opens no tensor data."""

    def __init__(self, path: Path) -> None:
        """``path`` is a folder with ``config.json``; raises :class:`CheckpointError` if it has none."""
        self.path = Path(path)
        self.config: Mapping[str, Any] = _read_json_object(self.path / "config.json")

    def section(self, name: str, kind: type[Section]) -> Section:
        """Part ``name`` of the config ("" is the top level) as the dataclass ``kind``.

        ``kind``'s fields are annotated int, float, bool or str (its module postpones annotations); one
        with a default may be absent. Raises :class:`CheckpointError` that names every missing or
        ill-typed field.
        """
        values = self.config.get(name) if name else self.config
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{self.path / 'config.json'}: {name} is missing or no object")
        problems, taken = [], {}
        for spec in fields(kind):  # type: ignore[arg-type]
            label = f"{name}.{spec.name}" if name else spec.name
            if spec.name not in values:
                if spec.default is MISSING:
                    problems.append(f"{label} is missing")
            elif _has_type(values[spec.name], spec.type):
                taken[spec.name] = values[spec.name]
            else:
                problems.append(f"{label} is {values[spec.name]!r}, expected {spec.type}")
        if problems:
            raise CheckpointError(f"{self.path / 'config.json'}: {'; '.join(problems)}")
        return kind(**taken)

    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint."""
        return frozenset(self._file_of)

    def load_prefix(
        self,
        prefix: str,
        expected: Mapping[str, Collection[int]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> dict[str, Tensor]:
        """Read the tensors whose names start with ``prefix``, as ``dtype`` on ``device``.

        ``expected`` holds name (without the prefix) -> shape and must match the checkpoint exactly but
        for :data:`IGNORED_TENSORS`; otherwise :class:`CheckpointError` names what differs.
        """
        found = {name for name in self._file_of if name.startswith(prefix)} - IGNORED_TENSORS
        wanted = {prefix + name: tuple(shape) for name, shape in expected.items()}
        problems = [
            _listed("missing", wanted.keys() - found),
            _listed("unexpected", found - wanted.keys()),
        ]
        if any(problems):
            raise CheckpointError(f"{self.path}: tensors under {prefix}: {'; '.join(filter(None, problems))}")
        tensors, misshapen = {}, []
        for name, tensor in self._read(wanted):
            if tuple(tensor.shape) == wanted[name]:
                # Moved as stored and cast there: half the bytes cross the bus for a bfloat16 store.
                tensors[name.removeprefix(prefix)] = tensor.to(device).to(dtype)
            else:
                misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(wanted[name])}")
        if misshapen:
            raise CheckpointError(f"{self.path}: {_listed('of a wrong shape', misshapen)}")
        return tensors

    def load_module(
        self, module: nn.Module, prefix: str, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Fill ``module``, built on the meta device, from the tensors under ``prefix``; no gradients."""
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        module.load_state_dict(self.load_prefix(prefix, expected, dtype, device), assign=True)
        module.requires_grad_(False)

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        """Tensor name -> the file that holds it."""
        single = self.path / WEIGHTS_FILE
        if single.is_file():
            with _opened(single) as weights:
                return dict.fromkeys(weights.keys(), single)
        index = self.path / INDEX_FILE
        if not index.is_file():
            raise CheckpointError(f"{self.path}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there")
        weight_map = _read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: weight_map is missing or no object")
        for shard in set(map(str, weight_map.values())):
            # A name only, so an index cannot reach outside its folder. The file itself may be a link:
            # that is how the Hugging Face cache keeps its blobs.
            if shard in ("", ".", "..") or {PurePosixPath(shard).name, PureWindowsPath(shard).name} != {
                shard
            }:
                raise CheckpointError(f"{index}: {shard!r} is no file name")
            if not (self.path / shard).is_file():
                raise CheckpointError(f"{self.path}: shard {shard} is missing; is the download complete?")
        return {name: self.path / str(shard) for name, shard in weight_map.items()}

    def _read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as stored, one file at a time."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        for path, in_file in by_file.items():
            with _opened(path) as weights:
                if absent := set(in_file) - set(weights.keys()):
                    raise CheckpointError(f"{path}: {_listed('missing though indexed', absent)}")
                for name in in_file:
                    yield name, weights.get_tensor(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _has_type(value: object, kind: object) -> bool:
    """Whether a JSON value is of the annotated type; JSON's true is no number, its 1 a float too."""
    allowed = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[str(kind)]
    return isinstance(value, allowed) and (isinstance(value, bool) == (kind == "bool"))


def _listed(label: str, names: Collection[str]) -> str:
    """``3 missing: a, b, c`` with at most :data:`LISTED_NAMES` names; empty for no names."""
    if not names:
        return ""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED_NAMES} more" if len(ordered) > LISTED_NAMES else ""
    return f"{len(ordered)} {label}: {', '.join(ordered[:LISTED_NAMES])}{more}"
