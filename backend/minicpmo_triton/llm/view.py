"""A small folder that shows vLLM the language model inside a MiniCPM-o checkpoint.

It holds a ``config.json`` of a Qwen3 model, the tokenizer's files, ``generation_config.json`` and links
to the shards that hold ``llm.`` tensors; no weight is copied and nothing of it runs remote code.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minicpmo_triton.errors import CheckpointError
from minicpmo_triton.llm.plugin import ARCHITECTURE
from minicpmo_triton.llm.thinking import END_TAG, START_TAG

PREFIX = "llm."
#: Parts of the checkpoint that other models read, or none (the talker).
OTHER_PREFIXES = ("vpm.", "resampler.", "apm.", "audio_projection_layer.", "tts.")

#: A folder for temporary files that somebody else removes; the launcher sets it.
SCRATCH_ENV = "MINICPMO_SCRATCH"

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_THINKING_TAGS = (START_TAG, END_TAG)

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "eos_token_id",
)
_OPTIONAL = (
    "head_dim",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "tie_word_embeddings",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "initializer_range",
    "bos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
)
_LAYER_TENSORS = (
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def open_view(checkpoint: Path, with_weights: bool = True) -> tempfile.TemporaryDirectory[str]:
    """Make the view of a checkpoint folder; the caller owns it (context manager, or ``cleanup()``).

    ``with_weights=False`` leaves the shards out (vLLM's ``load_format: dummy``). Raises
    :class:`CheckpointError` naming the missing file, key of config.json or tensors.
    """
    config = language_model_config(_read_json(checkpoint / "config.json"))
    shards = _language_model_shards(checkpoint, config) if with_weights else {}
    if not (checkpoint / "tokenizer.json").is_file():
        raise CheckpointError(f"{checkpoint} has no tokenizer.json")
    # In the launcher's own folder where there is one: that goes also when this process is killed.
    view = tempfile.TemporaryDirectory(prefix="minicpmo-llm-", dir=os.environ.get(SCRATCH_ENV))
    folder = Path(view.name)
    try:
        _write_json(folder / "config.json", config)
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(checkpoint))
        _make_tokenizer(checkpoint, folder)
        for name in ("generation_config.json", "special_tokens_map.json"):
            if (checkpoint / name).is_file():
                _link(checkpoint / name, folder)
        for shard in sorted(set(shards.values())):
            _link(checkpoint / shard, folder)
        if shards:
            # vLLM reads only the shards of the index.
            _write_json(folder / INDEX, {"metadata": {}, "weight_map": shards})
    except BaseException:
        view.cleanup()
        raise
    return view


def language_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's config.json reduced to the fields of its language model, as a Qwen3 model."""
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    if config.get("quantization_config"):
        raise CheckpointError("config.json has quantization_config: quantized checkpoints are not supported")
    fields = {key: config[key] for key in (*_REQUIRED, *_OPTIONAL) if key in config}
    return {"architectures": [ARCHITECTURE], "model_type": "qwen3", **fields}


def language_model_tensor(name: str) -> str | None:
    """A tensor's name without ``llm.``; None for one of another part of the checkpoint.

    Raises :class:`CheckpointError` for a tensor of no known part.
    """
    if name.startswith(PREFIX):
        return name[len(PREFIX) :]
    if name.startswith(OTHER_PREFIXES):
        return None
    known = ", ".join((PREFIX, *OTHER_PREFIXES))
    raise CheckpointError(f"unexpected tensor {name} in the checkpoint; known parts are {known}")


def expected_tensors(config: Mapping[str, Any]) -> set[str]:
    """Names (with ``llm.``) that a language model of this configuration must have."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.get("tie_word_embeddings", False):
        names.add("lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        names.update(f"model.layers.{layer}.{tensor}" for tensor in _LAYER_TENSORS)
    return {PREFIX + name for name in names}


def _language_model_shards(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """``llm.`` tensor -> file name of its shard, after checking that none is missing.

    vLLM itself does not notice a missing matrix (it takes it for one quantized online).
    """
    shards = _weight_map(checkpoint)
    ours = {name: shard for name, shard in shards.items() if language_model_tensor(name) is not None}
    missing = expected_tensors(config) - ours.keys()
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    absent = {shard for shard in ours.values() if not (checkpoint / shard).is_file()}
    if absent:
        raise CheckpointError(f"{checkpoint} lacks {_some(absent)}, which {INDEX} names")
    return ours


def _weight_map(checkpoint: Path) -> dict[str, str]:
    if (checkpoint / INDEX).is_file():
        weight_map = _read_json(checkpoint / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{checkpoint / INDEX} has no weight_map")
        return weight_map
    path = checkpoint / SINGLE
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} has neither {INDEX} nor {SINGLE}")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error


def _tokenizer_config(checkpoint: Path) -> dict[str, Any]:
    """tokenizer_config.json with the generic fast tokenizer instead of the checkpoint's own code."""
    path = checkpoint / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    for key in ("auto_map", "processor_class", "bad_token_ids"):
        config.pop(key, None)
    for token in config.get("added_tokens_decoder", {}).values():
        if token.get("content") in _THINKING_TAGS:
            token["special"] = False
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config


def _make_tokenizer(checkpoint: Path, folder: Path) -> None:
    """tokenizer.json with the thinking tags as ordinary tokens.

    The published tokenizer has them so; where they are special, answers would lack them by default and
    nothing in the text would tell the thinking from the answer.
    """
    definition = _read_json(checkpoint / "tokenizer.json")
    special = [
        token
        for token in definition.get("added_tokens", ())
        if token.get("content") in _THINKING_TAGS and token.get("special")
    ]
    if not special:
        _link(checkpoint / "tokenizer.json", folder)
        return
    for token in special:
        token["special"] = False
    _write_json(folder / "tokenizer.json", definition)


def _link(source: Path, folder: Path) -> None:
    (folder / source.name).symlink_to(source.absolute())


def _some(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
