"""The rules of capture, one by one, and the parameters they come from."""

from __future__ import annotations

import pytest
import torch

from minicpmo_triton.config import EncoderParameters
from minicpmo_triton.errors import ConfigError
from minicpmo_triton.graphs.policy import (
    GraphSettings,
    History,
    OutputSpec,
    Seen,
    admit,
    all_on,
    graph_key,
)
from minicpmo_triton.graphs.stats import Counters, Miss

CPU = torch.device("cpu")
OUTPUT = OutputSpec(torch.Size((64, 8)), torch.bfloat16)


def read(**values: str) -> EncoderParameters:
    return EncoderParameters.read({name: {"string_value": text} for name, text in values.items()}, env={})


def test_defaults_are_the_designs() -> None:
    parameters = read()
    assert parameters.encoder_cuda_graph is True
    assert parameters.encoder_cuda_graph_max_graphs == 4
    assert parameters.encoder_cuda_graph_min_capture_calls == 2
    assert parameters.encoder_cuda_graph_min_free_bytes == 1073741824
    assert parameters.encoder_cuda_graph_share_pools is True
    assert parameters.enforce_eager is False
    assert GraphSettings.from_parameters(parameters) == GraphSettings()


def test_every_parameter_reaches_the_settings() -> None:
    parameters = read(
        encoder_cuda_graph="true",
        encoder_cuda_graph_max_graphs="7",
        encoder_cuda_graph_min_capture_calls="5",
        encoder_cuda_graph_min_free_bytes="0",
        encoder_cuda_graph_share_pools="false",
    )
    assert GraphSettings.from_parameters(parameters) == GraphSettings(True, 7, 5, 0, False)


@pytest.mark.parametrize(
    ("graphs", "eager", "enabled"),
    [("true", "false", True), ("true", "true", False), ("false", "false", False), ("false", "true", False)],
)
def test_enforce_eager_always_disables(graphs: str, eager: str, enabled: bool) -> None:
    parameters = read(encoder_cuda_graph=graphs, enforce_eager=eager)
    assert GraphSettings.from_parameters(parameters).enabled is enabled


INTEGERS = ("max_graphs", "min_capture_calls", "min_free_bytes")


@pytest.mark.parametrize("text", ["4.0", "true", "-1", "", " 4", "4e9", "0x4", "٤"])
@pytest.mark.parametrize("name", [f"encoder_cuda_graph_{name}" for name in INTEGERS])
def test_integers_are_strict_and_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter {name}: expected an integer"):
        read(**{name: text})


@pytest.mark.parametrize("text", ["True", "1", "yes", "true ", ""])
@pytest.mark.parametrize("name", ["encoder_cuda_graph", "encoder_cuda_graph_share_pools", "enforce_eager"])
def test_booleans_are_strict_and_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter {name}: expected true or false"):
        read(**{name: text})


@pytest.mark.parametrize("text", ["0", "1"])
def test_the_first_call_can_not_be_captured(text: str) -> None:
    with pytest.raises(ConfigError, match=r"encoder_cuda_graph_min_capture_calls.*at least 2"):
        read(encoder_cuda_graph_min_capture_calls=text)


def key(stream: str = "s", **inputs: torch.Tensor | None) -> tuple[object, ...]:
    return graph_key(stream, inputs)


def test_key_is_exact() -> None:
    base = torch.zeros(2, 3)
    keys = [
        key(a=base, b=base),
        key("other stream", a=base, b=base),
        key(a=base, b=None),
        key(a=base),
        key(a=torch.zeros(3, 2), b=base),
        key(a=torch.zeros(6), b=base),
        key(a=base.bfloat16(), b=base),
        key(a=base.to("meta"), b=base),
        key(a=base, c=base),
    ]
    assert len(set(keys)) == len(keys)


def test_key_ignores_values_strides_and_order() -> None:
    base = torch.zeros(2, 3)
    assert key(a=base, b=None) == key(b=None, a=torch.ones(3, 2).t())
    assert hash(key(a=base)) == hash(key(a=torch.ones(2, 3)))


def test_only_tensors_of_the_one_device_are_eligible() -> None:
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert all_on(CPU, {"a": here, "b": None})
    assert not all_on(CPU, {"a": elsewhere})
    assert not all_on(CPU, {"a": here, "b": elsewhere})
    assert not all_on(CPU, {"a": None})
    assert not all_on(CPU, {})


def test_history_drops_the_first_recorded_even_if_called_since() -> None:
    history = History(2)
    a, b, c = key(a=None), key(b=None), key(c=None)
    for each in (a, b, a, a, c):
        history.record(each, OUTPUT)
    assert history.find(a) is None
    assert history.find(b) == Seen(OUTPUT, 1)
    assert history.find(c) == Seen(OUTPUT, 1)
    history.record(a, OUTPUT)
    assert history.find(a) == Seen(OUTPUT, 1)
    assert len(history) == 2


def no_memory_asked() -> int:
    raise AssertionError("the device's memory was asked for no reason")


@pytest.mark.parametrize(
    ("max_graphs", "num_graphs", "seen", "miss"),
    [
        (0, 0, None, Miss.CAPACITY),
        (2, 2, None, Miss.CAPACITY),
        (2, 2, Seen(OUTPUT, 9), Miss.CAPACITY),
        (2, 1, None, Miss.WARMUP),
        (2, 1, Seen(OUTPUT, 1), Miss.WARMUP),
        (2, 1, Seen(OUTPUT, 3), Miss.WARMUP),
    ],
)
def test_admission_asks_capacity_then_warmup(
    max_graphs: int, num_graphs: int, seen: Seen | None, miss: Miss
) -> None:
    settings = GraphSettings(max_graphs=max_graphs, min_capture_calls=5)
    assert admit(settings, num_graphs, seen, no_memory_asked) is miss


def test_admission_asks_memory_last() -> None:
    settings, seen = GraphSettings(min_capture_calls=5, min_free_bytes=100), Seen(OUTPUT, 4)
    assert admit(settings, 0, seen, lambda: 99) is Miss.MEMORY
    assert admit(settings, 0, seen, lambda: 100) is None
    assert admit(GraphSettings(min_free_bytes=0), 0, seen, no_memory_asked) is None


def test_output_spec_knows_its_bytes() -> None:
    assert OutputSpec.of(torch.zeros(64, 8, dtype=torch.bfloat16)) == OUTPUT
    assert OUTPUT.num_bytes == 64 * 8 * 2


def test_stats_have_the_designs_names_and_add_up() -> None:
    counters = Counters()
    assert counters.snapshot(0).hit_rate == 0.0
    counters.hits = 30
    counters.misses.update({Miss.INELIGIBLE: 1, Miss.CAPACITY: 2, Miss.WARMUP: 3, Miss.MEMORY: 4})
    assert counters.snapshot(3).as_dict() == {
        "graph_hits": 30,
        "graph_misses": 10,
        "hit_rate": 0.75,
        "num_graphs": 3,
        "ineligible_misses": 1,
        "capacity_misses": 2,
        "warmup_misses": 3,
        "memory_misses": 4,
        "capture_failures": 0,
    }
