"""The adapter's contract on a fake device: keys, admission, capacity, memory, pools, outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

from .graph_fake import CPU, POOL_BYTES, Case, Encoder, FakeDevice

# Point 1: the key.


def test_each_part_of_the_key_makes_its_own_graph() -> None:
    case = Case(max_graphs=10)
    rows, bias = torch.ones(2, 2), torch.ones(2)
    variants: list[Inputs] = [
        {"rows": rows},
        {"rows": rows, "bias": None},
        {"rows": rows, "bias": bias},
        {"rows": rows.double()},
        {"rows": torch.ones(4)},
    ]
    for stream in ("main", "side"):
        case.device.stream = stream
        for inputs in variants:
            for _ in range(3):
                assert torch.equal(case.adapter(inputs), Encoder()(inputs))
    assert case.num_captures == 2 * len(variants)
    assert case.hits == 2 * case.num_captures


def test_strides_do_not_matter() -> None:
    case = Case()
    square = torch.arange(9.0).view(3, 3)
    for rows in (square, square.t(), torch.ones(3, 6)[:, ::2], square.t()):
        assert torch.equal(case.adapter({"rows": rows}), rows * 2)
    assert (case.num_captures, case.hits) == (1, 3)
    assert all(t is None or t.is_contiguous() for t in case.device.graphs[0].static_inputs.values())


def test_eager_and_captured_runs_see_the_same_layout() -> None:
    seen: list[bool] = []

    def forward(inputs: Inputs) -> Tensor:
        rows = inputs["rows"]
        assert rows is not None
        seen.append(rows.is_contiguous())
        return rows.clone()

    adapter = GraphAdapter(forward, GraphSettings(), CPU, FakeDevice())
    for _ in range(3):
        adapter({"rows": torch.ones(2, 3).t()})
    assert len(seen) >= 3
    assert all(seen)


# Point 2: admission.


@pytest.mark.parametrize("min_calls", [2, 5])
def test_captured_on_the_min_capture_calls_th_call(min_calls: int) -> None:
    case = Case(min_capture_calls=min_calls)
    for _ in range(min_calls - 1):
        case.call(3)
    assert (case.num_captures, case.misses()) == (0, {"warmup": min_calls - 1})
    case.call(3)
    assert (case.num_captures, case.hits) == (1, 1)
    for _ in range(10):
        case.call(3)
    assert (case.num_captures, case.hits) == (1, 11)
    assert case.misses() == {"warmup": min_calls - 1}
    assert len(case.capture_seconds) == 1
    assert 0 <= case.capture_seconds[0] < 10


def test_history_is_bounded_and_an_evicted_key_counts_again() -> None:
    case = Case(max_graphs=2, min_capture_calls=3)
    for _ in range(2):
        case.call(1)  # one more would capture it
    for num_rows in range(2, 2 + 4 * 2):  # 4 x max_graphs other keys push it out
        case.call(num_rows)
    case.call(1)
    case.call(1)
    assert case.num_captures == 0
    case.call(1)
    assert case.num_captures == 1


def test_a_key_still_in_the_history_keeps_its_count() -> None:
    case = Case(max_graphs=2, min_capture_calls=3)
    for _ in range(2):
        case.call(1)
    for num_rows in range(2, 1 + 4 * 2):  # one fewer than pushes it out
        case.call(num_rows)
    case.call(1)
    assert case.num_captures == 1


def test_a_captured_key_leaves_the_history() -> None:
    case = Case(max_graphs=2)
    for num_rows in (1, 2, 2):  # 2 is captured: its place is free again
        case.call(num_rows)
    for num_rows in range(3, 3 + 7):
        case.call(num_rows)
    case.call(1)
    assert case.num_captures == 2


def test_a_call_that_raises_counts_nowhere() -> None:
    case = Case()
    case.encoder.error = ValueError("bad rows")
    with pytest.raises(ValueError, match="bad rows"):
        case.call(1)
    assert case.adapter.failed is None
    case.encoder.error = None
    case.call(1)
    assert (case.num_captures, case.misses()) == (0, {"warmup": 1})
    case.call(1)
    assert case.num_captures == 1


# Point 3: capacity.


def test_capacity_never_evicts() -> None:
    case = Case(max_graphs=2)
    for num_rows in (1, 2):
        for _ in range(2):
            case.call(num_rows)
    for _ in range(5):
        case.call(3)
        case.call(1)
        case.call(2)
    assert case.num_captures == 2
    assert case.misses() == {"warmup": 2, "capacity": 5}
    assert case.hits == 12
    assert case.adapter.get_cumulative_stats().num_graphs == 2


def test_zero_graphs_makes_every_eligible_call_a_capacity_miss() -> None:
    case = Case(max_graphs=0)
    for _ in range(4):
        case.call(1)
    case.device.gradients = True
    case.call(1)
    assert case.misses() == {"capacity": 4, "ineligible": 1}
    assert case.device.events == []  # vLLM is not even imported


def test_disabled_makes_every_call_ineligible() -> None:
    case = Case(enabled=False)
    for _ in range(4):
        case.call(1)
    assert case.misses() == {"ineligible": 4}
    assert case.device.events == []


# Point 4: memory floor.


def test_memory_floor_skips_now_and_admits_later() -> None:
    case = Case(min_free_bytes=1000)
    for _ in range(2):
        case.call(1)
    assert case.num_captures == 1
    case.device.free = 999
    for _ in range(4):
        case.call(2)
    assert case.misses() == {"warmup": 2, "memory": 3}
    case.call(1)  # what is captured still replays
    assert case.hits == 2
    case.device.free = 1000
    case.call(2)
    assert (case.num_captures, case.hits) == (2, 3)


def test_floor_of_zero_does_not_ask() -> None:
    case = Case(min_free_bytes=0)
    case.device.free = 0
    for _ in range(3):
        case.call(1)
    assert (case.num_captures, case.device.num_free_asked) == (1, 0)


# Point 5: pools and their order.


def events_of(device: FakeDevice, *names: str) -> list[str]:
    return [event for event in device.events if event.split()[0] in names]


def test_shared_pools_are_one_per_replay_stream() -> None:
    case = Case(max_graphs=4, share_pools=True)
    for stream in ("main", "side"):
        case.device.stream = stream
        for num_rows in (1, 2):
            for _ in range(2):
                case.call(num_rows)
    assert events_of(case.device, "capture") == ["capture on pool0"] * 2 + ["capture on pool1"] * 2


def test_private_pools_are_one_per_graph() -> None:
    case = Case(max_graphs=4, share_pools=False)
    for num_rows in (1, 2, 3):
        for _ in range(2):
            case.call(num_rows)
    assert events_of(case.device, "capture") == [f"capture on pool{i}" for i in range(3)]


def test_adapters_do_not_share_pools() -> None:
    device = FakeDevice()
    for case in (Case(device), Case(device)):
        for _ in range(2):
            case.call(1)
    assert events_of(device, "capture") == ["capture on pool0", "capture on pool1"]


def test_a_late_capture_waits_for_replays_and_replays_wait_for_it() -> None:
    case = Case()
    for num_rows in (1, 1, 1, 2):
        case.call(num_rows)
    case.device.events.clear()
    case.call(2)
    assert case.device.events == [
        "static copy",
        "pool0 waits for main",
        "capture on pool0",
        "main waits for pool0",
        "replay on main",
    ]


def test_bytes_are_summed_over_graphs() -> None:
    case = Case()
    for num_rows in (1, 1, 3, 3):
        case.call(num_rows)
    row_bytes = 2 * 4  # two float32, in the input and in the output
    assert case.adapter.static_bytes == 2 * (1 + 3) * row_bytes
    assert case.adapter.pool_bytes == 2 * POOL_BYTES


# Point 6: outputs.


def test_outputs_survive_later_replays() -> None:
    case = Case()
    kept = [case.call(1) for _ in range(20)]
    assert [float(output[0, 0]) for output in kept] == [2.0 * (i + 1) for i in range(20)]
    assert len({output.data_ptr() for output in kept}) == 20


def test_the_callers_inputs_are_left_alone() -> None:
    case = Case()
    rows = [torch.full((1, 2), float(i)) for i in range(5)]
    for each in rows:
        case.adapter({"rows": each})
    assert [float(each[0, 0]) for each in rows] == [0.0, 1.0, 2.0, 3.0, 4.0]
