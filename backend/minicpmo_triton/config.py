"""Typed parameters of each Triton model, read from config.pbtxt and overridden by the environment.

A parameter is a field of one of the dataclasses below. Triton hands every value over as a string;
integers and booleans are parsed strictly (``"4.0"``, ``"true "`` and ``"-1"`` are refused), an unknown
key is an error, and every error names the parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from minicpmo_triton.errors import ConfigError

DEFAULT_CHECKPOINT = "openbmb/MiniCPM-o-4_5"
DTYPES = ("auto", "bfloat16", "float32")

P = TypeVar("P", bound="ModelParameters")


def parse_int(name: str, text: str, minimum: int = 0) -> int:
    """A decimal integer of at least ``minimum``, digits only; :class:`ConfigError` otherwise."""
    if not re.fullmatch(r"[0-9]+", text, re.ASCII):
        raise ConfigError(f"parameter {name}: expected an integer of at least {minimum}, got {text!r}")
    value = int(text)
    if value < minimum:
        raise ConfigError(f"parameter {name}: expected an integer of at least {minimum}, got {text!r}")
    return value


def parse_bool(name: str, text: str) -> bool:
    """``true`` or ``false``; :class:`ConfigError` otherwise."""
    if text not in ("true", "false"):
        raise ConfigError(f"parameter {name}: expected true or false, got {text!r}")
    return text == "true"


def _parse(name: str, spec: Field[Any], text: str) -> object:
    if spec.type == "bool":
        return parse_bool(name, text)
    if spec.type == "int":
        return parse_int(name, text, spec.metadata.get("minimum", 0))
    choices = spec.metadata.get("choices")
    if choices and text not in choices:
        raise ConfigError(f"parameter {name}: expected one of {', '.join(choices)}, got {text!r}")
    return text


def at_least(minimum: int, default: int) -> int:
    """A dataclass field holding an integer of at least ``minimum``."""
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True)
class ModelParameters:
    """What every model takes: where the checkpoint is and what type it runs in."""

    #: Local folder or Hugging Face id; environment ``MINICPMO_CHECKPOINT``.
    checkpoint: str = field(default=DEFAULT_CHECKPOINT, metadata={"env": "MINICPMO_CHECKPOINT"})
    #: ``bfloat16``, ``float32`` or ``auto`` (bfloat16 on a GPU, float32 on a CPU); ``MINICPMO_DTYPE``.
    dtype: str = field(default="auto", metadata={"env": "MINICPMO_DTYPE", "choices": DTYPES})

    @classmethod
    def read(
        cls: type[P], parameters: Mapping[str, Mapping[str, str]], env: Mapping[str, str] = os.environ
    ) -> P:
        """Parse the ``parameters`` of a Triton model configuration (name -> ``{"string_value": …}``).

        The environment wins over config.pbtxt. Raises :class:`ConfigError` for an unknown key or a
        value of the wrong type.
        """
        known = {spec.metadata.get("key", spec.name): spec for spec in fields(cls)}
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown parameter {unknown[0]} in config.pbtxt; known are {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {}
        for name, spec in known.items():
            text = env.get(spec.metadata.get("env", "")) or parameters.get(name, {}).get("string_value")
            if text is not None:
                values[spec.name] = _parse(name, spec, text)
            elif spec.default is MISSING:
                raise ConfigError(f"parameter {name} is missing in config.pbtxt")
        return cls(**values)


@dataclass(frozen=True)
class PreprocessParameters(ModelParameters):
    """Limits that ``preprocess`` holds before it allocates anything, and its threads."""

    #: Characters of all text of one request, before it becomes tokens.
    max_text_characters: int = at_least(1, 1_000_000)
    #: Pixels of one decoded image.
    max_image_pixels: int = at_least(1, 100_000_000)
    #: Bytes of one media item after base64.
    max_media_bytes: int = at_least(1, 128 * 1024 * 1024)
    #: Images, and separately audio clips and videos, of one request.
    max_media_items: int = at_least(1, 256)
    #: Seconds of one audio clip.
    max_audio_seconds: int = at_least(1, 3600)
    #: Seconds of one video.
    max_video_seconds: int = at_least(1, 3600)
    #: Pixels of one frame of a video; the default is 4K in either orientation.
    max_video_pixels: int = at_least(1, 4096 * 2304)
    #: Threads that decode; 0 takes the number of cores.
    num_threads: int = at_least(0, 0)


@dataclass(frozen=True)
class EncoderParameters(ModelParameters):
    """Parameters of ``vision_encoder`` and ``audio_encoder``."""

    #: Capture exact-shape CUDA graphs; docs/architecture.md says when a call uses one.
    encoder_cuda_graph: bool = True
    #: Graphs at most, never evicted; 0 captures none.
    encoder_cuda_graph_max_graphs: int = at_least(0, 4)
    #: The call of a shape that captures it, counted from 1; those before run eagerly.
    encoder_cuda_graph_min_capture_calls: int = at_least(2, 2)
    #: No capture while the device has fewer free bytes than this; 0 does not ask.
    encoder_cuda_graph_min_free_bytes: int = at_least(0, 1024**3)
    #: Graphs replayed on one stream share one memory pool.
    encoder_cuda_graph_share_pools: bool = True
    #: Run every call eagerly, whatever ``encoder_cuda_graph`` says.
    enforce_eager: bool = False


@dataclass(frozen=True)
class LLMParameters(ModelParameters):
    """Parameters of ``llm``; the engine's own arguments are in ``1/model.json``."""

    #: Whether vLLM's own metrics appear on Triton's endpoint; named as in Triton's vLLM backend.
    report_custom_metrics: bool = field(default=True, metadata={"key": "REPORT_CUSTOM_METRICS"})


def resolve_dtype(dtype: str, on_gpu: bool) -> str:
    """``auto`` becomes bfloat16 on a GPU and float32 on a CPU; other names stay."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype
