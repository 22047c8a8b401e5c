"""Times of single calls, and what the device can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Times:
    """Of ``num_calls`` calls, in milliseconds: the middle, and the tenth and ninetieth percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    num_calls: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Times:
        p10, median, p90 = np.percentile(milliseconds, (10, 50, 90)).round(4).tolist()
        return cls(median, p10, p90, len(milliseconds))

    def __str__(self) -> str:
        return f"{self.median_ms:.2f} ({self.p10_ms:.2f}-{self.p90_ms:.2f})"

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(call: Callable[[], object], device: torch.device, repeats: int, warmup: int = 5) -> Times:
    """How long ``call`` takes on an idle device, its result ready: host work counts where it is longer.

    On a GPU between two events on the current stream, elsewhere by the host's clock.
    """
    for _ in range(warmup):
        call()
    once = _by_events if device.type == "cuda" else _by_clock
    return Times.of([once(call) for _ in range(repeats)])


def _by_clock(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def _by_events(call: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds_each(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Of ``count`` calls one after another, without waiting in between; the best of three rounds."""
    rounds = []
    for _ in range(4):  # the first warms up
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        rounds.append((time.perf_counter() - started) / count)
    return min(rounds[1:])


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 8192, count: int = 20) -> float:
    """Floating-point operations per second of a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds_each(lambda: torch.matmul(a, b, out=out), device, count)


def read_rate(device: torch.device, num_bytes: int = 1 << 31, count: int = 10) -> float:
    """Bytes per second that a copy within the device's memory reads and writes together."""
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds_each(lambda: target.copy_(source), device, count)
