"""Which kernels a call spends its time in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.timing import synchronize

NUM_CALLS = 5
NUM_KERNELS = 15
NAME_LENGTH = 90


def kernel_shares(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Per kernel name, the longest first: milliseconds and launches in one call, share of all kernels.

    On a CPU its operators instead.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(2):
        call()
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(NUM_CALLS):
            call()
        synchronize(device)
    found = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU")
    ]
    total_us = sum(us for _, us, _ in found)
    return [
        {"kernel": name, "ms": us / NUM_CALLS / 1000, "launches": count / NUM_CALLS, "share": us / total_us}
        for name, us, count in sorted(found, key=lambda each: -each[1])
        if us > 0
    ][:NUM_KERNELS]


def kernel_table(kernels: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            each["kernel"][:NAME_LENGTH],
            f"{each['ms']:.3f}",
            f"{each['launches']:g}",
            f"{each['share'] * 100:.1f}",
        ]
        for each in kernels
    ]
    return report.table(["kernel", "ms", "launches", "%"], rows)
