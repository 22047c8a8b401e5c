"""Checkpoint folders: found, read by prefix, and refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minicpmo_triton.checkpoint import Checkpoint, resolve_checkpoint
from minicpmo_triton.errors import CheckpointError

PROJECTION = {
    "linear1.weight": (128, 64),
    "linear1.bias": (128,),
    "linear2.weight": (128, 128),
    "linear2.bias": (128,),
}


def write_sharded(tiny: Path, out: Path) -> Path:
    """The tiny checkpoint in two shards: the language model's, and everything else."""
    tensors = load_file(tiny / "model.safetensors")
    shard_of = {
        name: f"model-0000{1 if name.startswith('llm.') else 2}-of-00002.safetensors" for name in tensors
    }
    out.mkdir(exist_ok=True)
    shutil.copy(tiny / "config.json", out)
    for shard in set(shard_of.values()):
        save_file({name: tensors[name] for name, file in shard_of.items() if file == shard}, out / shard)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return out


@pytest.fixture
def sharded(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return write_sharded(tiny_checkpoint, tmp_path / "sharded")


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Writes a checkpoint of the tensors and config given."""

    def write(tensors: dict[str, torch.Tensor] | None = None, config: object = None) -> Checkpoint:
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        save_file(tensors or {"a.x": torch.zeros(2)}, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path)

    return write


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-such", "gone", "a/b/c"])
def test_a_missing_folder_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(name)


def test_a_cached_snapshot_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_checkpoint("some/model") == snapshot


def test_offline_without_a_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"some/model.*HF_HUB_OFFLINE is set"):
        resolve_checkpoint("some/model")


def test_only_top_level_data_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("some/model") == tmp_path
    files = ["config.json", "modeling.py", "model.safetensors", "assets/voice.safetensors", "merges.txt"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files,
        allow_patterns=asked["allow_patterns"],  # type: ignore[arg-type]
        ignore_patterns=asked["ignore_patterns"],  # type: ignore[arg-type]
    )
    assert set(kept) == {"config.json", "model.safetensors", "merges.txt"}


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff"])
def test_a_config_that_cannot_be_read_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(tmp_path)


@dataclass(frozen=True)
class Section:
    size: int
    scale: float
    on: bool
    name: str = "default"


def test_a_section_is_read_into_its_dataclass(small: Callable[..., Checkpoint]) -> None:
    values = {"size": 3, "scale": 1, "on": False}
    assert small(config={"part": values, "more": 1}).section("part", Section) == Section(3, 1, False)
    assert small(config={**values, "name": "x"}).section("", Section) == Section(3, 1, False, "x")


def test_every_wrong_field_of_a_section_is_named(small: Callable[..., Checkpoint]) -> None:
    with pytest.raises(CheckpointError) as caught:
        small(config={"part": {"size": True, "on": 1, "name": None}}).section("part", Section)
    for problem in ("part.size is True", "part.scale is missing", "part.on is 1", "part.name is None"):
        assert problem in str(caught.value)


def test_an_absent_section_is_named(small: Callable[..., Checkpoint]) -> None:
    with pytest.raises(CheckpointError, match="part is missing"):
        small().section("part", Section)


def test_names_are_the_same_in_one_file_and_in_shards(tiny_checkpoint: Path, sharded: Path) -> None:
    names = Checkpoint(tiny_checkpoint).tensor_names()
    assert Checkpoint(sharded).tensor_names() == names
    assert "llm.lm_head.weight" in names


def test_a_prefix_is_read_from_one_file_and_from_shards(tiny_checkpoint: Path, sharded: Path) -> None:
    stored = load_file(tiny_checkpoint / "model.safetensors")
    for folder in (tiny_checkpoint, sharded):
        loaded = Checkpoint(folder).load_prefix("audio_projection_layer.", PROJECTION, torch.float32, "cpu")
        assert loaded.keys() == PROJECTION.keys()
        for name, tensor in loaded.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, stored[f"audio_projection_layer.{name}"].float())


def test_shards_of_other_prefixes_are_not_opened(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").write_text("not safetensors")
    checkpoint = Checkpoint(sharded)
    assert checkpoint.load_prefix("audio_projection_layer.", PROJECTION, torch.bfloat16, "cpu")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        checkpoint.load_prefix("llm.lm_head.", {"weight": (512, 128)}, torch.bfloat16, "cpu")


def test_missing_and_unexpected_tensors_are_counted_and_named(small: Callable[..., Checkpoint]) -> None:
    checkpoint = small({f"a.extra{i}": torch.zeros(1) for i in range(7)} | {"b.x": torch.zeros(1)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_prefix("a.", {"gone": (1,)}, torch.float32, "cpu")
    message = str(caught.value)
    assert "1 missing: a.gone;" in message
    assert "7 unexpected: a.extra0, a.extra1, a.extra2, a.extra3, a.extra4 and 2 more" in message


def test_wrong_shapes_are_named(small: Callable[..., Checkpoint]) -> None:
    with pytest.raises(CheckpointError, match=r"a\.x is \[2\], expected \[3\]"):
        small().load_prefix("a.", {"x": (3,)}, torch.float32, "cpu")


def test_known_buffers_are_left_unread(small: Callable[..., Checkpoint]) -> None:
    tensors = {"resampler.query": torch.ones(2), "resampler.pos_embed": torch.zeros(3)}
    loaded = small(tensors).load_prefix("resampler.", {"query": (2,)}, torch.float32, "cpu")
    assert loaded.keys() == {"query"}


def test_a_module_on_the_meta_device_is_filled(small: Callable[..., Checkpoint]) -> None:
    weight, bias = torch.randn(2, 3).bfloat16(), torch.randn(2).bfloat16()
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    small({"a.weight": weight, "a.bias": bias}).load_module(module, "a.", torch.float32, "cpu")
    assert torch.equal(module.weight, weight.float())
    assert torch.equal(module.bias, bias.float())
    assert not module.weight.requires_grad


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "..", "", "..\\x", 5]
)
def test_an_index_cannot_reach_outside_its_folder(shard: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a.x": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is no file name|shard 5 is missing"):
        Checkpoint(tmp_path).tensor_names()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        Checkpoint(sharded).tensor_names()


def test_a_tensor_indexed_but_absent_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["extra.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"1 missing though indexed: extra\.weight"):
        Checkpoint(sharded).load_prefix("extra.", {"weight": (1,)}, torch.float32, "cpu")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path).tensor_names()


def test_a_truncated_file_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((tiny_checkpoint / "model.safetensors").read_bytes()[:9999])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        Checkpoint(tmp_path).tensor_names()
