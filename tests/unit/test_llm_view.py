"""The folder that shows vLLM the language model of a MiniCPM-o checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minicpmo_triton.errors import CheckpointError
from minicpmo_triton.llm.plugin import ARCHITECTURE
from minicpmo_triton.llm.view import (
    INDEX,
    expected_tensors,
    language_model_config,
    language_model_tensor,
    open_view,
)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def save_shards(checkpoint: Path, drop: str | None = None, add: str | None = None) -> None:
    """Replace model.safetensors by two shards: the language model, and everything else."""
    tensors = load_file(checkpoint / "model.safetensors")
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(1)
    shards = {name: "a.safetensors" if name.startswith("llm.") else "b.safetensors" for name in tensors}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: t for name, t in tensors.items() if shards[name] == shard}, checkpoint / shard)
    (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (checkpoint / "model.safetensors").unlink()


def test_the_view_links_the_weights_and_goes_with_its_owner(tiny_checkpoint: Path) -> None:
    with open_view(tiny_checkpoint) as name:
        view = Path(name)
        assert (view / "model.safetensors").is_symlink()
        assert (view / "model.safetensors").samefile(tiny_checkpoint / "model.safetensors")
        config = json.loads((view / "config.json").read_text())
        original = json.loads((tiny_checkpoint / "config.json").read_text())
        assert config["architectures"] == [ARCHITECTURE]
        assert config["model_type"] == "qwen3"
        assert config["hidden_size"] == original["hidden_size"]
        assert config["rope_theta"] == original["rope_theta"]
        assert "vision_config" not in config
        assert (view / "generation_config.json").is_file()
    assert not view.exists()


def test_only_shards_of_the_language_model_are_linked(checkpoint: Path) -> None:
    save_shards(checkpoint)
    with open_view(checkpoint) as name:
        assert sorted(path.name for path in Path(name).glob("*.safetensors")) == ["a.safetensors"]
        weight_map = json.loads((Path(name) / INDEX).read_text())["weight_map"]
    assert set(weight_map.values()) == {"a.safetensors"}
    assert all(tensor.startswith("llm.") for tensor in weight_map)


@pytest.mark.parametrize("sharded", [False, True])
def test_missing_tensors_are_named(checkpoint: Path, sharded: bool) -> None:
    name = "llm.model.layers.1.self_attn.k_proj.weight"
    if sharded:
        save_shards(checkpoint, drop=name)
    else:
        tensors = load_file(checkpoint / "model.safetensors")
        del tensors[name]
        save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        open_view(checkpoint)


def test_tensors_of_no_known_part_are_named(checkpoint: Path) -> None:
    save_shards(checkpoint, add="vpn.weight")
    with pytest.raises(CheckpointError, match=r"unexpected tensor vpn\.weight .* llm\., vpm\."):
        open_view(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    save_shards(checkpoint)
    (checkpoint / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks a\.safetensors"):
        open_view(checkpoint)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        open_view(checkpoint)


def test_a_truncated_shard_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_view(checkpoint)


def test_dummy_weights_need_no_shards(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with open_view(checkpoint, with_weights=False) as name:
        assert not list(Path(name).glob("*.safetensors"))


def test_configurations_that_cannot_run_are_refused(tiny_checkpoint: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match="lacks hidden_size, num_hidden_layers"):
        language_model_config({**config, "hidden_size": None, "num_hidden_layers": None})
    with pytest.raises(CheckpointError, match="quantized"):
        language_model_config({**config, "quantization_config": {"quant_method": "awq"}})


def test_the_expected_tensors_are_those_of_the_checkpoint(tiny_checkpoint: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    names = load_file(tiny_checkpoint / "model.safetensors").keys()
    assert expected_tensors(config) == {name for name in names if name.startswith("llm.")}


def test_names_lose_their_prefix_or_are_left_to_others() -> None:
    assert language_model_tensor("llm.lm_head.weight") == "lm_head.weight"
    assert language_model_tensor("tts.head.weight") is None
    with pytest.raises(CheckpointError, match=r"unexpected tensor lm_head\.weight"):
        language_model_tensor("lm_head.weight")


def test_a_tokenizer_of_remote_code_loads_as_the_generic_one(fixtures_dir: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    published = fixtures_dir.parent / "minicpm-o-4_5"
    if not (published / "tokenizer.json").is_file():
        pytest.skip("the published tokenizer is not at hand")
    with open_view(published, with_weights=False) as name:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert "auto_map" not in json.loads((Path(name) / "tokenizer_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 151645
    assert tokenizer.convert_tokens_to_ids("<unk>") == 128244
    plain = Tokenizer.from_file(str(published / "tokenizer.json"))
    cases = json.loads((fixtures_dir / "goldens" / "real_tokenizer.json").read_text())
    ids = [case["expected"]["input_ids"] for case in cases.values()]
    assert ids
    assert [tokenizer.decode(one) for one in ids] == [
        plain.decode(one, skip_special_tokens=False) for one in ids
    ]
    text = cases["text"]["expected"]
    assert tokenizer(text["prompt"]).input_ids == text["input_ids"]


@pytest.mark.parametrize("special", [True, False])
def test_the_thinking_tags_are_ordinary_tokens(tiny_checkpoint: Path, tmp_path: Path, special: bool) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    definition = json.loads((checkpoint / "tokenizer.json").read_text())
    for token in definition["added_tokens"]:
        if token["content"] in ("<think>", "</think>"):
            token["special"] = special
    (checkpoint / "tokenizer.json").write_text(json.dumps(definition))
    with open_view(checkpoint) as folder:
        path = Path(folder) / "tokenizer.json"
        seen = json.loads(path.read_text())
        assert path.is_symlink() is not special  # the published tokenizer is left as it is
    flags = {token["content"]: token["special"] for token in seen["added_tokens"]}
    assert (flags["<think>"], flags["</think>"], flags["<|im_end|>"]) == (False, False, True)
