"""The adapter's contract, point by point, on a fake device."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from minicpmo_triton.errors import ConfigError, Unavailable
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import CaptureGate
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

from .graph_fake import POOL_BYTES, FakeDevice

CPU = torch.device("cpu")
TIMEOUT_S = 10


class Encoder:
    """Twice its input, plus the bias when there is one; counts its runs."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.error: Exception | None = None

    def __call__(self, inputs: Inputs) -> Tensor:
        self.num_runs += 1
        if self.error is not None:
            raise self.error
        rows, bias = inputs["rows"], inputs.get("bias")
        assert rows is not None
        return rows * 2 if bias is None else rows * 2 + bias


class Case:
    """An adapter over a fake device; ``call(n)`` encodes n rows and checks the result."""

    def __init__(self, device: FakeDevice | None = None, **settings: Any) -> None:
        self.device = device or FakeDevice()
        self.encoder = Encoder()
        self.capture_seconds: list[float] = []
        self.adapter = GraphAdapter(
            self.encoder, GraphSettings(**settings), CPU, self.device, self.capture_seconds.append
        )
        self.num_calls = 0

    def call(self, num_rows: int) -> Tensor:
        self.num_calls += 1
        rows = torch.full((num_rows, 2), float(self.num_calls))
        output = self.adapter({"rows": rows})
        assert torch.equal(output, rows * 2)
        return output

    def misses(self) -> dict[str, int]:
        """Misses by reason, without those that are zero."""
        stats = self.adapter.get_cumulative_stats().as_dict()
        suffix = "_misses"
        return {
            name.removesuffix(suffix): int(n)
            for name, n in stats.items()
            if name.endswith(suffix) and name != "graph_misses" and n
        }

    @property
    def hits(self) -> int:
        return self.adapter.get_cumulative_stats().graph_hits

    @property
    def num_captures(self) -> int:
        return len(self.device.graphs)


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
    assert 0 <= case.capture_seconds[0] < TIMEOUT_S


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


# Threads: callers queue, and a capture is alone in its process.


def test_on_capture_may_read_the_counters() -> None:
    seen: list[int] = []
    device = FakeDevice()
    adapter = GraphAdapter(
        Encoder(),
        GraphSettings(),
        CPU,
        device,
        lambda _: seen.append(adapter.get_cumulative_stats().num_graphs),
    )
    for _ in range(2):
        adapter({"rows": torch.ones(1)})
    assert seen == [1]


def test_callers_of_one_adapter_queue() -> None:
    running, most = 0, 0

    def forward(inputs: Inputs) -> Tensor:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.002)
        running -= 1
        rows = inputs["rows"]
        assert rows is not None
        return rows * 2

    adapter = GraphAdapter(forward, GraphSettings(), CPU, FakeDevice())
    wrong: list[float] = []

    def caller(value: float) -> None:
        for _ in range(10):
            output = adapter({"rows": torch.full((3,), value)})
            if not torch.equal(output, torch.full((3,), 2 * value)):
                wrong.append(value)

    threads = [threading.Thread(target=caller, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (wrong, most) == ([], 1)
    stats = adapter.get_cumulative_stats()
    assert (stats.graph_hits, stats.warmup_misses, stats.num_graphs) == (39, 1, 1)


def test_a_capture_waits_for_calls_of_other_adapters_and_keeps_new_ones_out() -> None:
    gate = CaptureGate()
    order: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def slow(inputs: Inputs) -> Tensor:
        entered.set()
        assert leave.wait(TIMEOUT_S)
        order.append("slow call")
        return torch.zeros(1)

    def capture() -> None:
        with gate.exclusive():
            order.append("capture begins")
            threading.Event().wait(0.02)
            order.append("capture ends")

    def late_call() -> None:
        with gate:
            order.append("late call")

    device = FakeDevice(gate=gate)
    adapter = GraphAdapter(slow, GraphSettings(), CPU, device)
    calling = threading.Thread(target=adapter, args=({"rows": torch.ones(1)},))
    capturing, late = threading.Thread(target=capture), threading.Thread(target=late_call)
    calling.start()
    assert entered.wait(TIMEOUT_S)
    capturing.start()
    while not gate._num_waiting:
        threading.Event().wait(0.001)
    late.start()
    late.join(0.02)
    assert order == []  # the capture waits for the call, the late call for the capture
    leave.set()
    for thread in (calling, capturing, late):
        thread.join(TIMEOUT_S)
    assert order == ["slow call", "capture begins", "capture ends", "late call"]


def test_the_adapter_captures_inside_the_gate() -> None:
    class Watching(FakeDevice):
        def capture(self, *args: Any) -> Any:
            self.events.append(f"alone {self.gate._capturing and not self.gate._num_calls}")
            return super().capture(*args)

    device = Watching()
    case = Case(device)
    for _ in range(2):
        case.call(1)
    assert "alone True" in device.events
    with device.gate:  # released after it
        pass
