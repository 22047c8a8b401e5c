"""Threads: callers of one adapter queue, and a capture is alone in its process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import CaptureGate
from minicpmo_triton.graphs.policy import GraphSettings, Inputs

from .graph_fake import CPU, Case, Encoder, FakeDevice

TIMEOUT_S = 10


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
