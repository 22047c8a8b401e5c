"""The encoders alone: ordinary module, ours eagerly, ours on captured graphs, and the floor.

    python -m benchmarks.encoders

Each request is timed twice: ``device`` is the forward over inputs that are on the device already;
``host`` starts from host arrays (ours: one request's patches or mel frames through the encoder as the
server uses it; ordinary: a padded float32 batch) and ends with the rows on the device. Every call starts
on an idle device, so what the host takes to launch it counts. Without a GPU there are no graphs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.kernels import kernel_shares, kernel_table
from benchmarks.results import Graph, Result, errors_table, graphs_table, times_table
from benchmarks.subjects import (
    Example,
    Ordinary,
    OrdinaryInput,
    Recorder,
    Seam,
    Subject,
    adapter_maker,
    add_options,
    call_name,
    device_and_dtype,
    subjects,
)
from benchmarks.timing import Times, matrix_rate, measure, read_rate
from minicpmo_triton.graphs.adapter import GraphAdapter
from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.graphs.policy import GraphKey, Inputs, graph_key

MAX_GRAPHS = 64  # more than there are keys


@dataclass(frozen=True)
class Rates:
    """What the device was seen to do: operations and bytes per second."""

    operations: float
    bytes: float


class Bench:
    """One encoder: results of its requests, then facts about its graphs."""

    _recorder: Recorder
    _adapter: GraphAdapter | None = None  # None without graphs

    def __init__(
        self,
        subject: Subject[Any],
        device: torch.device,
        rates: Rates,
        options: argparse.Namespace,
        seam: Seam | None,
    ) -> None:
        self._subject, self._device, self._rates = subject, device, rates
        self._repeats, self._seam = options.repeats, seam
        self._dtype = next(subject.module.parameters()).dtype
        self.examples = subject.examples(options.seed)
        self._eager = subject.encoder(self._record)
        has_graphs = device.type == "cuda" or seam is not None
        self._captured = subject.encoder(self._capture) if has_graphs else None
        #: Per key, in the order of their captures: an example's inputs, static bytes, pool bytes.
        self._kept: dict[GraphKey, tuple[Inputs, int, int]] = {}

    def _record(self, forward: Forward) -> Recorder:
        self._recorder = Recorder(forward)
        return self._recorder

    def _capture(self, forward: Forward) -> GraphAdapter:
        self._adapter = adapter_maker(self._device, self._seam, max_graphs=MAX_GRAPHS)(forward)
        return self._adapter

    def recorded_calls(self, example: Example[Any]) -> list[Inputs]:
        """The forward's inputs in each call that the request makes."""
        self._recorder.calls.clear()
        self._eager(example.item)
        return self._recorder.calls.copy()

    def results(self) -> list[Result]:
        """Times and errors of every example; this captures their keys."""
        ordinary = self._subject.ordinary()
        results = [self._result(example, ordinary) for example in self.examples]
        self._add_errors(results, ordinary)
        return results

    def _result(self, example: Example[Any], ordinary: Ordinary) -> Result:
        calls = self.recorded_calls(example)
        floor_ms, least_floor_ms = (
            self._subject.operations(example.lengths, least) / self._rates.operations * 1000
            for least in (False, True)
        )
        names = [call_name(inputs, self._subject.unit) for inputs in calls]
        result = Result(example, names, floor_ms, least_floor_ms)
        if self._adapter is not None:
            for inputs in calls:
                key = graph_key(None, inputs)
                if key not in self._kept:
                    self._kept[key] = (inputs, *kept_bytes(self._adapter, inputs))
        for (start, way), call in self._ways(example, calls, ordinary).items():
            result.times[start, way] = self._replayed(call) if way == "captured" else self._measured(call)
        return result

    def _ways(
        self, example: Example[Any], calls: Sequence[Inputs], ordinary: Ordinary
    ) -> dict[tuple[str, str], Callable[[], object]]:
        """The six calls to be timed, by (start, way)."""
        forward, adapter, captured = self._recorder.forward, self._adapter, self._captured
        given = self._subject.ordinary_input(example.item)
        on_device = self._moved(given)
        ways: dict[tuple[str, str], Callable[[], object]] = {
            ("device", "ordinary"): lambda: ordinary(on_device),
            ("host", "ordinary"): lambda: ordinary(self._moved(given)),
            ("device", "eager"): lambda: [forward(inputs) for inputs in calls],
            ("host", "eager"): lambda: self._eager(example.item),
        }
        if adapter is not None and captured is not None:
            ways["device", "captured"] = lambda: [adapter(inputs) for inputs in calls]
            ways["host", "captured"] = lambda: captured(example.item)
        return ways

    def _measured(self, call: Callable[[], object]) -> Times:
        times = measure(call, self._device, self._repeats)
        self._recorder.calls.clear()  # they hold the inputs
        return times

    def _replayed(self, call: Callable[[], object]) -> Times:
        """Times of ``call``, made sure to be replays."""
        assert self._adapter is not None
        num_misses = self._adapter.get_cumulative_stats().graph_misses
        times = self._measured(call)
        if self._adapter.get_cumulative_stats().graph_misses != num_misses:
            raise RuntimeError("calls that should have been replayed ran eagerly")
        return times

    def _moved(self, given: OrdinaryInput) -> OrdinaryInput:
        return moved(given, self._device, self._dtype)

    def _add_errors(self, results: Sequence[Result], ordinary: Ordinary) -> None:
        """Of each way with the weights and values that were measured."""
        ways = {"eager": self._eager}
        if self._captured is not None:
            ways["captured"] = self._captured
        add_errors(results, self._subject, self.examples, self._device, ways, ordinary)

    def graphs(self) -> list[Graph]:
        """The keys that :meth:`results` captured into one shared pool, captured again into pools of
        their own. A graph's share of the shared pool is what it added to those before it."""
        if self._adapter is None:
            return []
        forward, shared = self._recorder.forward, self._adapter
        make_private = adapter_maker(self._device, self._seam, max_graphs=MAX_GRAPHS, share_pools=False)
        private = make_private(forward)
        return [
            Graph(
                call_name(inputs, self._subject.unit),
                eager=self._measured(partial(forward, inputs)),
                replay=self._replayed(partial(shared, inputs)),
                static_bytes=static_bytes,
                shared_pool_bytes=pool_bytes,
                private_pool_bytes=kept_bytes(private, inputs)[1],
            )
            for inputs, static_bytes, pool_bytes in self._kept.values()
        ]

    def profile(self) -> dict[str, Any]:
        """The kernels of one call of the request that is to be profiled, replayed where there are graphs."""
        [example] = [example for example in self.examples if example.profiled]
        calls = self.recorded_calls(example)
        forward = self._adapter or self._recorder.forward
        kernels = kernel_shares(lambda: [forward(inputs) for inputs in calls], self._device)
        return {"request": example.name, "kernels": kernels}


def add_errors(
    results: Sequence[Result],
    subject: Subject[Any],
    examples: Sequence[Example[Any]],
    device: torch.device,
    ways: Mapping[str, Callable[[Any], Tensor]],
    ordinary: Ordinary,
) -> None:
    """Errors to the ordinary module in float32 with the same weights, over each request's rows."""
    reference = subject.ordinary(torch.float32)
    dtype = next(subject.module.parameters()).dtype
    for result, example in zip(results, examples, strict=True):
        given = subject.ordinary_input(example.item)
        want, plain = (
            subject.ordinary_rows(output, example.lengths)
            for output in (
                reference(moved(given, device, torch.float32)),
                ordinary(moved(given, device, dtype)),
            )
        )
        result.add_error("ordinary", relative_error(plain, want))
        for way, encode in ways.items():
            result.add_error(way, relative_error(encode(example.item), want))


def moved(given: OrdinaryInput, device: torch.device, dtype: torch.dtype) -> OrdinaryInput:
    return OrdinaryInput(given.batch.to(device).to(dtype), given.sizes)


def kept_bytes(adapter: GraphAdapter, inputs: Inputs) -> tuple[int, int]:
    """Capture ``inputs``; the static bytes and the pool bytes that this added."""
    static_bytes, pool_bytes = adapter.static_bytes, adapter.pool_bytes
    for _ in range(2):
        adapter(inputs)
    return adapter.static_bytes - static_bytes, adapter.pool_bytes - pool_bytes


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm of ``want``."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def run_subject(
    make: Callable[[int], Subject[Any]],
    device: torch.device,
    rates: Rates,
    options: argparse.Namespace,
    seam: Seam | None,
) -> dict[str, Any]:
    """Measure and print one encoder; its part of the JSON line."""
    subject = make(options.seed)
    bench = Bench(subject, device, rates, options, seam)
    results, graphs = bench.results(), bench.graphs()
    for seed in range(options.seed + 1, options.seed + options.error_draws):
        other = make(seed)
        ways = {"eager": other.encoder()}
        add_errors(results, other, other.examples(seed), device, ways, other.ordinary())
    weights_ms = subject.num_weight_bytes / rates.bytes * 1000
    print(f"\n{subject.name}: milliseconds, median (10th to 90th percentile) of {options.repeats} calls")
    print(times_table(results))
    print(f"reading the weights once takes at least {weights_ms:.2f} ms, whatever the request")
    print(f"\n{subject.name}: relative error to the ordinary module in float32, same weights:")
    print(f"mean (least to largest) of {options.error_draws} draws of weights and values")
    print(errors_table(results))
    if graphs:
        print(f"\n{subject.name}: graphs, in the order of their captures")
        print(graphs_table(graphs))
        slower = [graph.name for graph in graphs if graph.slower]
        print(f"keys whose replay is slower than eager here: {', '.join(slower) or 'none'}")
    part: dict[str, Any] = {
        "results": [result.as_dict() for result in results],
        "graphs": [graph.as_dict() for graph in graphs],
        "weights_ms": weights_ms,
    }
    if options.profile:
        profile = part["profile"] = bench.profile()
        print(f"\n{subject.name}: kernels of one call, {profile['request']}")
        print(kernel_table(profile["kernels"]))
    return part


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--repeats", type=int, help="timed calls of each kind; default: 40, with --tiny 3")
    parser.add_argument(
        "--error-draws",
        type=int,
        help="draws of weights and values to take errors of, the captured one's of the first;"
        " default: 8, with --tiny 2",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also list the kernels of one captured call: 1 slice, and 30 s of audio",
    )
    options = parser.parse_args(argv)
    options.repeats = options.repeats or (3 if options.tiny else 40)
    options.error_draws = options.error_draws or (2 if options.tiny else 8)
    return options


def main(argv: Sequence[str] | None = None, seam: Seam | None = None) -> None:
    """Run the command. ``seam`` stands in for the device's graphs in tests."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    device, dtype = device_and_dtype(options)
    about = report.environment("encoders", argv, device, dtype)
    print(report.heading(about))
    torch.backends.cudnn.allow_tf32 = False  # a float32 reference is to be one
    with torch.inference_mode():
        size, num_bytes = (256, 1 << 22) if options.tiny else (8192, 1 << 31)
        rates = Rates(matrix_rate(device, dtype, size), read_rate(device, num_bytes))
        print(
            f"matrix product {size}^3: {rates.operations / 1e12:.3g} TFLOP/s;"
            f" memory: {rates.bytes / 1e12:.3g} TB/s"
        )
        parts: dict[str, Any] = {}
        for name, make in subjects(options, device, dtype).items():
            parts[name] = run_subject(make, device, rates, options, seam)
            gc.collect()  # the graphs and weights of this one, before the next one's memory is measured
    result = {**about, "matrix_rate": rates.operations, "memory_rate": rates.bytes, **parts}
    print(report.json_line(result))


if __name__ == "__main__":
    main()
