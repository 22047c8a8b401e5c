"""Parameters of config.pbtxt: strict, typed, overridden by the environment."""

from __future__ import annotations

import pytest

from minicpmo_triton.config import DEFAULT_CHECKPOINT, LLMParameters, PreprocessParameters, resolve_dtype
from minicpmo_triton.errors import ConfigError


def parameters(**values: str) -> dict[str, dict[str, str]]:
    return {name: {"string_value": value} for name, value in values.items()}


def test_defaults_stand_where_nothing_is_given() -> None:
    read = PreprocessParameters.read({}, env={})
    assert read == PreprocessParameters()
    assert read.checkpoint == DEFAULT_CHECKPOINT
    assert read.dtype == "auto"


def test_values_are_parsed() -> None:
    read = PreprocessParameters.read(parameters(max_media_items="3", dtype="float32"), env={})
    assert (read.max_media_items, read.dtype) == (3, "float32")


def test_environment_wins() -> None:
    env = {"MINICPMO_CHECKPOINT": "elsewhere", "MINICPMO_DTYPE": "bfloat16"}
    read = LLMParameters.read(parameters(checkpoint="here", dtype="float32"), env=env)
    assert (read.checkpoint, read.dtype) == ("elsewhere", "bfloat16")


@pytest.mark.parametrize("text", ["4.0", "true", "-1", " 4", "4 ", "", "0x4", "٤", "1_000"])
def test_integers_are_strict(text: str) -> None:
    with pytest.raises(ConfigError, match="max_media_items"):
        PreprocessParameters.read(parameters(max_media_items=text), env={})


def test_minimum_is_held() -> None:
    with pytest.raises(ConfigError, match=r"max_image_pixels.*at least 1"):
        PreprocessParameters.read(parameters(max_image_pixels="0"), env={})
    assert PreprocessParameters.read(parameters(num_threads="0"), env={}).num_threads == 0


def test_unknown_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown parameter max_pixels"):
        PreprocessParameters.read(parameters(max_pixels="1"), env={})


def test_choices_are_held() -> None:
    with pytest.raises(ConfigError, match=r"dtype.*float16"):
        LLMParameters.read(parameters(dtype="float16"), env={})


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "resolved"),
    [("auto", True, "bfloat16"), ("auto", False, "float32"), ("float32", True, "float32")],
)
def test_resolve_dtype(dtype: str, on_gpu: bool, resolved: str) -> None:
    assert resolve_dtype(dtype, on_gpu) == resolved
