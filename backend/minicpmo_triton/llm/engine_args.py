"""vLLM's engine arguments: ``1/model.json``, overridden by the environment, checked by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minicpmo_triton.errors import ConfigError

ENGINE_ARGS_ENV = "MINICPMO_ENGINE_ARGS"

_OURS = {
    "model": "the checkpoint comes from the parameter checkpoint (MINICPMO_CHECKPOINT)",
    "tokenizer": "the checkpoint comes from the parameter checkpoint (MINICPMO_CHECKPOINT)",
    "dtype": "the type comes from the parameter dtype (MINICPMO_DTYPE)",
    "enable_prompt_embeds": "image and audio embeddings need it on",
    "skip_tokenizer_init": "answers are text",
    "trust_remote_code": "nothing runs code from a checkpoint",
    "runner": "the model generates",
}


def read_engine_args(path: Path) -> dict[str, Any]:
    """The JSON object of a ``model.json``; :class:`ConfigError` when it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    return _parse_object(text, path.name)


def merge_engine_args(engine_args: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """``engine_args`` with those of ``MINICPMO_ENGINE_ARGS`` (a JSON object) over them.

    Raises :class:`ConfigError` for a key vLLM does not know or the server sets itself.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    override = env.get(ENGINE_ARGS_ENV)
    sources = [("model.json", engine_args)]
    if override:
        sources.append((ENGINE_ARGS_ENV, _parse_object(override, ENGINE_ARGS_ENV)))
    known = {spec.name for spec in dataclasses.fields(AsyncEngineArgs)}
    merged: dict[str, Any] = {}
    for source, args in sources:
        for key in args:
            if key in _OURS:
                raise ConfigError(f"{source}: {key} cannot be set here: {_OURS[key]}")
            if key not in known:
                raise ConfigError(f"{source}: unknown engine argument {key}")
        merged.update({key: _unquote(value) for key, value in args.items()})
    return merged


def _unquote(value: Any) -> Any:
    # The samples of Triton's vLLM backend write booleans in quotes; to vLLM "false" would be true.
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _parse_object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must be a JSON object")
    return value
