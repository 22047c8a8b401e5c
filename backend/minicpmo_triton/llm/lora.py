"""LoRA adapters by name: ``multi_lora.json`` beside model.json, as Triton's vLLM backend has it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minicpmo_triton.errors import ConfigError, InvalidArgument
from minicpmo_triton.llm.engine_args import merge_engine_args

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

ADAPTERS_FILE = "multi_lora.json"
FIELD = "sampling_parameters.lora_name"

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def read_lora_adapters(
    folder: Path, engine_args: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> dict[str, Path]:
    """Adapters of ``folder``/multi_lora.json, a JSON object of name and path; none without ``enable_lora``.

    Relative paths start at ``folder``. Raises :class:`ConfigError` when LoRA is enabled and the file is
    missing or malformed, or an entry is no folder of an adapter.
    """
    if not merge_engine_args(engine_args, env).get("enable_lora"):
        return {}
    path = folder / ADAPTERS_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repetition)
    except OSError as error:
        raise ConfigError(
            f"{ADAPTERS_FILE} cannot be read: {error.strerror}; enable_lora needs it beside model.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{ADAPTERS_FILE} is not valid JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(target, str) for target in value.values()):
        raise ConfigError(f"{ADAPTERS_FILE} must be a JSON object of adapter names and paths")
    return {name: _adapter(name, folder / target) for name, target in value.items()}


def lora_engine_args(args: Mapping[str, Any], adapters: Mapping[str, Path]) -> dict[str, Any]:
    """vLLM's engine arguments that serving ``adapters`` takes beside ``args``."""
    if not args.get("enable_lora"):
        return {}
    max_loras = args.get("max_loras", 1)
    if not torch.cuda.is_available():
        # vLLM's LoRA on the CPU applies the last slot to requests without an adapter; leave it empty.
        max_loras = max(max_loras, len(adapters) + 1)
    # Each adapter is read once, at load: one that had to be read again could fail under requests.
    max_cpu_loras = args.get("max_cpu_loras") or max(max_loras, len(adapters))
    return {"max_loras": max_loras, "max_cpu_loras": max(max_loras, max_cpu_loras)}


def lora_requests(adapters: Mapping[str, Path]) -> dict[str, LoRARequest]:
    """What vLLM takes with a request, by the adapter's name."""
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(name, number, str(path))
        for number, (name, path) in enumerate(adapters.items(), start=1)
    }


def check_lora_name(name: str | None, adapters: Mapping[str, Any] | None) -> None:
    """Raise :class:`InvalidArgument` for an adapter that is not served; ``adapters`` None: LoRA is off."""
    if name is None:
        return
    if adapters is None:
        raise InvalidArgument(FIELD, "LoRA feature is not enabled.")
    if name not in adapters:
        raise InvalidArgument(FIELD, f"LoRA {name} is not supported, we currently support {list(adapters)}")


def _adapter(name: str, path: Path) -> Path:
    if not name:
        raise ConfigError(f"{ADAPTERS_FILE}: an adapter has no name")
    if not (path / "adapter_config.json").is_file():
        raise ConfigError(f"{ADAPTERS_FILE}: {name}: {path} has no adapter_config.json")
    if not any((path / file).is_file() for file in _WEIGHTS):
        raise ConfigError(f"{ADAPTERS_FILE}: {name}: {path} has no {_WEIGHTS[0]}")
    return path.resolve()


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an adapter's name appears twice")
    return value
