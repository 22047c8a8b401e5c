"""The adapter's contract on a fake device: a failed capture latches; ineligible calls run eagerly."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from minicpmo_triton.errors import ConfigError, Unavailable
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

from .graph_fake import CPU, Case, Encoder, FakeDevice

# Point 7: failure.


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of luck"), KeyboardInterrupt()])
def test_a_failed_capture_latches(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    case = Case()
    for num_rows in (1, 1, 2):
        case.call(num_rows)
    case.device.capture_error = error
    with caplog.at_level(logging.ERROR), pytest.raises(type(error)) as raised:
        case.call(2)
    assert raised.value is error
    assert case.adapter.failed is error
    assert "set encoder_cuda_graph to false" in caplog.text
    before = case.adapter.get_cumulative_stats()
    assert (before.capture_failures, before.num_graphs) == (1, 1)

    num_runs, num_events = case.encoder.num_runs, len(case.device.events)
    case.device.capture_error = None
    for num_rows in (1, 2, 3):  # captured, failed, never seen
        with pytest.raises(Unavailable, match="restart; or set encoder_cuda_graph to false") as refused:
            case.call(num_rows)
        assert refused.value.__cause__ is error
    assert (case.encoder.num_runs, len(case.device.events)) == (num_runs, num_events)
    assert case.adapter.get_cumulative_stats() == before
    assert before.graph_hits + before.graph_misses == 3  # the calls answered


def test_a_failure_stays_with_its_adapter() -> None:
    device = FakeDevice()
    failing, other = Case(device), Case(device)
    failing.call(1)
    device.capture_error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        failing.call(1)
    device.capture_error = None
    for _ in range(3):
        other.call(1)
    assert (other.hits, other.adapter.failed) == (2, None)


def test_a_forward_that_changes_its_output_fails_the_capture() -> None:
    num_runs = 0

    def forward(inputs: Inputs) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        return torch.zeros(1 if num_runs == 1 else 2)

    adapter = GraphAdapter(forward, GraphSettings(), CPU, FakeDevice())
    adapter({"rows": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"eagerly and .* captured"):
        adapter({"rows": torch.ones(1)})
    assert adapter.failed is not None


def test_graphs_that_can_not_be_made_fail_the_load() -> None:
    device = FakeDevice(verify_error=ConfigError("wrong vLLM"))
    with pytest.raises(ConfigError, match="wrong vLLM"):
        Case(device)
    Case(device, enabled=False).call(1)
    Case(device, max_graphs=0).call(1)


# Point 8: ineligible calls.


@pytest.mark.parametrize("state", ["gradients", "autocast", "capturing"])
def test_state_that_makes_a_call_ineligible(state: str) -> None:
    case = Case()
    for _ in range(2):
        case.call(1)
    setattr(case.device, state, True)
    for _ in range(3):
        case.call(1)
        case.call(2)
    assert case.misses() == {"warmup": 1, "ineligible": 6}
    setattr(case.device, state, False)
    case.call(2)  # ineligible calls did not count towards its capture
    assert case.misses() == {"warmup": 2, "ineligible": 6}


@pytest.mark.parametrize(
    "inputs",
    [
        {"rows": torch.ones(1, device="meta")},
        {"rows": torch.ones(1), "bias": torch.ones(1, device="meta")},
        {"rows": None},
        {},
    ],
    ids=["other device", "mixed devices", "absent", "empty"],
)
def test_inputs_that_make_a_call_ineligible(inputs: Inputs) -> None:
    adapter = GraphAdapter(lambda inputs: torch.zeros(1), GraphSettings(), CPU, FakeDevice())
    for _ in range(3):
        adapter(inputs)
    stats = adapter.get_cumulative_stats()
    assert (stats.ineligible_misses, stats.graph_misses, stats.graph_hits) == (3, 3, 0)


def test_on_a_real_cpu_every_call_is_ineligible() -> None:
    adapter = GraphAdapter(Encoder(), GraphSettings(), CPU)
    for _ in range(5):
        assert torch.equal(adapter({"rows": torch.ones(2)}), torch.full((2,), 2.0))
    assert adapter.get_cumulative_stats().as_dict() == {
        "graph_hits": 0,
        "graph_misses": 5,
        "hit_rate": 0.0,
        "num_graphs": 0,
        "ineligible_misses": 5,
        "capacity_misses": 0,
        "warmup_misses": 0,
        "memory_misses": 0,
        "capture_failures": 0,
    }
    assert (adapter.static_bytes, adapter.pool_bytes, adapter.failed) == (0, 0, None)
