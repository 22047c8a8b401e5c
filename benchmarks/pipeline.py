"""The whole pipeline through tritonserver and gRPC: time to first token, throughput, and where time goes.

    python -m benchmarks.pipeline --published FOLDER      # full size, random weights, an NVIDIA GPU
    python -m benchmarks.pipeline --tiny --quick          # every part of it, anywhere

Every request has media of its own (:mod:`benchmarks.requests`) and an answer of exactly ``--tokens`` tokens;
prefix caching is off. One client at a time gives the time to first token; more clients, each asking again
as soon as it has its answer, give requests per second over the whole run, its ramps included. The same is
asked of one process without Triton (:mod:`benchmarks.single_process`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import tritonclient.grpc as triton_grpc
from tests.scrape import settled, total

from benchmarks import report
from benchmarks.load import LoadGenerator, Run
from benchmarks.pipeline_tables import show
from benchmarks.requests import KINDS
from benchmarks.serving import (
    ENGINE_ARGS,
    TINY_ENGINE_ARGS,
    capture_batches,
    derived_repository,
    random_checkpoint,
    say,
    serving,
    switch_graphs,
    tiny_checkpoint,
)
from benchmarks.single_process import SingleProcess
from benchmarks.steps import between, breakdown, read_statistics, read_traces

TRACED_REQUESTS = 8
WARM_REQUESTS = 4
#: From the request's arrival at the engine's front end, and from its first scheduling.
ENGINE_PARTS = {
    "first token": "vllm:time_to_first_token_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
}
_GRAPH = "minicpmo_encoder_graph"


@dataclass(frozen=True)
class Plan:
    """What is measured, on whatever answers."""

    kinds: tuple[str, ...]
    concurrencies: tuple[int, ...]
    requests: int  # of one client
    rounds: int  # of each of several clients
    num_tokens: int

    def ends(self) -> Plan:
        """The same with the fewest and the most clients only."""
        return replace(self, concurrencies=tuple(sorted({self.concurrencies[0], self.concurrencies[-1]})))


class Target(Protocol):
    """Takes a load: the server's clients, or the single process."""

    def run(self, kind: str, concurrency: int, per_stream: int, num_tokens: int, first_index: int) -> Run: ...


class Measurement:
    """Loads of every kind on one target; requests are numbered on, so that none comes twice."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target, self._plan = target, plan
        self._next_index = 0

    def load(self, kind: str, concurrency: int, per_stream: int, num_tokens: int = 0) -> Run:
        index = self._next_index
        self._next_index += concurrency * per_stream
        return self._target.run(kind, concurrency, per_stream, num_tokens or self._plan.num_tokens, index)

    def warm_up(self, kind: str) -> None:
        """Kernels, memory and connections, at one client and at the most there will be."""
        self.load(kind, 1, WARM_REQUESTS, num_tokens=8)
        if max(self._plan.concurrencies) > 1:
            self.load(kind, max(self._plan.concurrencies), 1, num_tokens=8)

    def measure(self, kind: str) -> dict[str, dict[str, float]]:
        """Concurrency -> figures."""
        result = {}
        for concurrency in self._plan.concurrencies:
            per_stream = self._plan.requests if concurrency == 1 else self._plan.rounds
            result[str(concurrency)] = of = figures(self.load(kind, concurrency, per_stream))
            say(  # so that a run that is cut off has told what it found
                f"  {concurrency} clients: first token {of['first_token_ms']:.1f} ms (p90 "
                f"{of['first_token_p90_ms']:.1f}), inter-token {of['inter_token_ms']:.2f} ms, "
                f"{of['requests_per_s']:.1f} requests/s"
            )
        return result


def figures(run: Run) -> dict[str, float]:
    values = {
        "first_token_ms": run.percentile("first_token_ms", 50),
        "first_token_p90_ms": run.percentile("first_token_ms", 90),
        "inter_token_ms": run.percentile("inter_token_ms", 50),
        "requests_per_s": run.requests_per_s,
        "client_cores": run.client_cores,
    }
    return {"requests": len(run.answered), **{name: round(value, 3) for name, value in values.items()}}


def measure_server(
    checkpoint: Path, settings: argparse.Namespace, plan: Plan, modes: Sequence[bool]
) -> dict[str, dict[str, Any]]:
    """Name of each mode, the encoders' graphs on or off, -> its figures, all of one server."""
    with tempfile.TemporaryDirectory(prefix="minicpmo-benchmark-") as scratch:
        parameters = {"encoder_cuda_graph_max_graphs": str(settings.max_graphs)}
        repository = derived_repository(Path(scratch) / "models", parameters)
        trace_file = Path(scratch) / "trace.json"
        say("starting tritonserver")
        results: dict[str, dict[str, Any]] = {}
        traced: dict[str, dict[str, Run]] = {}
        with (
            serving(checkpoint, repository, settings.engine_args, settings.dtype, trace_file) as server,
            triton_grpc.InferenceServerClient(server.grpc_url) as triton,
            LoadGenerator(server.grpc_url, settings.clients) as clients,
        ):
            for graphs in modes:
                name = f"triton{'' if graphs else ', eager'}"
                say(name)
                switch_graphs(triton, graphs)
                if graphs and torch.cuda.is_available():
                    capture_batches(triton, plan.kinds)
                of_mode = plan if graphs or len(modes) == 1 else plan.ends()
                results[name], traced[name] = measure_running(
                    server.metrics_url, triton, clients, of_mode, trace=True
                )
        traces = read_traces(trace_file)  # written as the server ends
    for name, runs in traced.items():
        for kind, run in runs.items():
            results[name]["kinds"][kind]["steps_ms"] = breakdown(run.answered, traces)
    return results


def measure_running(
    metrics_url: str, triton: Any, clients: Target, plan: Plan, trace: bool
) -> tuple[dict[str, Any], dict[str, Run]]:
    """All kinds on a running server, and with ``trace`` the traced requests of each.

    The trace itself is written when the server ends.
    """
    measurement = Measurement(clients, plan)
    kinds: dict[str, Any] = {}
    traced: dict[str, Run] = {}
    for kind in plan.kinds:
        say(kind)
        measurement.warm_up(kind)
        graphs_before, statistics = graph_counters(metrics_url), read_statistics(triton)
        loads = measurement.measure(kind)
        kinds[kind] = {
            "clients": loads,
            "triton": between(statistics, read_statistics(triton)),
            "graph_counters": {
                name: value - graphs_before[name] for name, value in graph_counters(metrics_url).items()
            },
        }
        if trace:
            triton.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
            before = engine_seconds(metrics_url)
            traced[kind] = measurement.load(kind, 1, TRACED_REQUESTS)
            after = engine_seconds(metrics_url)
            kinds[kind]["engine_ms"] = {
                name: round(1000 * (after[name] - before[name]) / TRACED_REQUESTS, 3) for name in ENGINE_PARTS
            }
            triton.update_trace_settings(settings={"trace_level": ["OFF"]})
    return {"kinds": kinds, "graphs_at_the_end": graph_counters(metrics_url)["graphs"]}, traced


def engine_seconds(metrics_url: str) -> dict[str, float]:
    """vLLM's totals of the time to first token, from its front end's view and from the scheduler's."""
    samples = settled(metrics_url, "vllm:")
    return {name: total(samples, f"{metric}_sum") for name, metric in ENGINE_PARTS.items()}


def graph_counters(metrics_url: str) -> dict[str, float]:
    samples = settled(metrics_url, "minicpmo_encoder")
    return {
        "hits": total(samples, f"{_GRAPH}_hits_total"),
        "misses": total(samples, f"{_GRAPH}_misses_total"),
        "graphs": total(samples, f"{_GRAPH}s"),
        "calls": total(samples, "minicpmo_encoder_seconds_count"),
        "call_seconds": total(samples, "minicpmo_encoder_seconds_sum"),
    }


def measure_single_process(checkpoint: Path, settings: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    say("starting the single process")
    kinds = {}
    with SingleProcess(checkpoint, settings.engine_args, settings.dtype) as process:
        measurement = Measurement(process, plan)
        for kind in plan.kinds:
            say(kind)
            measurement.warm_up(kind)
            kinds[kind] = {"clients": measurement.measure(kind)}
    return {"kinds": kinds}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--published", type=Path, help="the published JSON and tokenizer files")
    source.add_argument("--checkpoint", type=Path, help="a checkpoint folder as it is")
    source.add_argument("--tiny", action="store_true", help="a tiny checkpoint, in float32 on a CPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--requests", type=int, default=20, help="of one client (default: 20)")
    parser.add_argument("--rounds", type=int, default=6, help="of each of several clients (default: 6)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: 64)")
    parser.add_argument(
        "--graphs",
        choices=("on", "off", "both"),
        default="on",
        help="of the encoders; with both, the second pass has the fewest and the most clients (default: on)",
    )
    parser.add_argument(
        "--max-graphs", type=int, default=24, help="of each encoder, above the server's default (default: 24)"
    )
    parser.add_argument("--clients", type=int, help="client processes (default: 4, or the cores if fewer)")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, over the defaults")
    parser.add_argument("--no-single-process", action="store_true", help="leave the comparison out")
    parser.add_argument("--no-server", action="store_true", help="only the comparison")
    parser.add_argument("--quick", action="store_true", help="10 requests of one client, 3 rounds of 32")
    settings = parser.parse_args(argv)
    if settings.quick:
        settings.requests, settings.rounds = 10, 3
        settings.concurrency = [1, max(settings.concurrency)]
    settings.clients = settings.clients or min(4, len(os.sched_getaffinity(0)))
    settings.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    defaults: dict[str, Any] = dict(TINY_ENGINE_ARGS if settings.tiny else ENGINE_ARGS)
    if settings.published:
        defaults["load_format"] = "dummy"
    settings.engine_args = {**defaults, **settings.engine_args}
    return settings


def run(settings: argparse.Namespace, plan: Plan, checkpoint: Path) -> dict[str, Any]:
    """Target -> its figures."""
    results: dict[str, Any] = {}
    if not settings.no_server:
        modes = {"on": (True,), "off": (False,), "both": (True, False)}[settings.graphs]
        results |= measure_server(checkpoint, settings, plan, modes)
        if not settings.no_single_process:
            show(results, plan.kinds)  # already now: the rest takes minutes
    if not settings.no_single_process:
        results["single process"] = measure_single_process(checkpoint, settings, plan)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of the single process, which shares our output
    settings = parse(argv)
    plan = Plan(
        tuple(settings.kinds),
        tuple(sorted(set(settings.concurrency))),
        settings.requests,
        settings.rounds,
        settings.tokens,
    )
    with tempfile.TemporaryDirectory(prefix="minicpmo-checkpoint-") as folder:
        if settings.published:
            say("writing a checkpoint with random encoders")
        checkpoint = (
            tiny_checkpoint(Path(folder))
            if settings.tiny
            else random_checkpoint(settings.published, Path(folder))
            if settings.published
            else settings.checkpoint
        )
        results = run(settings, plan, checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = report.environment("pipeline", list(argv or sys.argv[1:]), device, getattr(torch, settings.dtype))
    about |= {"cores": os.cpu_count(), "engine_args": settings.engine_args, "max_graphs": settings.max_graphs}
    print(report.heading(about))
    show(results, plan.kinds)
    print(report.json_line({**about, "tokens": plan.num_tokens, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
