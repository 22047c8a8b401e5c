"""Whole steps become graphs on Hopper, unless the operator has decided otherwise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from minicpmo_triton.llm.step_graphs import CAPTURE_SIZES, major_capability, step_graph_args


def test_hopper_gets_whole_steps() -> None:
    config = step_graph_args({"max_model_len": 8192, "enforce_eager": False}, 9)["compilation_config"]
    assert config["cudagraph_mode"] == "FULL"
    assert config["cudagraph_capture_sizes"] == list(CAPTURE_SIZES)


@pytest.mark.parametrize("major", [None, 8, 10])
def test_other_devices_keep_vllms_default(major: int | None) -> None:
    assert step_graph_args({}, major) == {}


@pytest.mark.parametrize(
    "decided",
    [
        {"enforce_eager": True},
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        {"max_cudagraph_capture_size": 512},
        {"attention_backend": "TRITON_ATTN"},
    ],
)
def test_the_operators_word_stands(decided: dict[str, Any]) -> None:
    assert step_graph_args(decided, 9) == {}


def test_sizes_grow_and_are_padded_by_an_eighth_at_most() -> None:
    for small, large in pairwise(CAPTURE_SIZES):
        assert small < large <= max(small + 8, small * 1.13)


def test_arguments_are_known_to_vllm() -> None:
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    [name] = step_graph_args({}, 9)
    arguments = AsyncEngineArgs(**{name: step_graph_args({}, 9)[name]})
    assert isinstance(arguments.compilation_config, CompilationConfig | dict)
    assert major_capability() is None or isinstance(major_capability(), int)
