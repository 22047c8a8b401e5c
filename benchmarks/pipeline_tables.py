"""The tables of :mod:`benchmarks.pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.steps import STEPS


def show(results: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Tables of everything, targets side by side."""
    rows: list[list[object]] = []
    for kind in kinds:
        for target, result in results.items():
            for concurrency, figure in result["kinds"][kind]["clients"].items():
                rows.append(
                    [
                        kind,
                        target,
                        concurrency,
                        *(report.ms(figure[name]) for name in list(figure)[1:]),
                    ]
                )
    header = ["request", "served by", "clients", "first token ms", "p90", "inter-token ms", "req/s"]
    print(report.table([*header, "client cores"], rows))
    for target, result in results.items():
        if "graphs_at_the_end" in result:
            _show_steps(target, result["kinds"])
            _show_statistics(target, result["kinds"])
            _show_encoder_calls(target, result["kinds"])


def _show_steps(target: str, kinds: Mapping[str, Any]) -> None:
    print(f"\n{target}: one client's time to first token by step, medians, ms")
    rows = [
        [kind, *(report.ms(of["steps_ms"][step]) for step in STEPS), report.ms(until_scheduled(of))]
        for kind, of in kinds.items()
        if of["steps_ms"]
    ]
    print(report.table(["request", *STEPS, "until scheduled"], rows))
    for step, meaning in STEPS.items():
        print(f"  {step}: {meaning}")
    print(
        "  until scheduled: from llm's start until the engine first schedules the request: the hand-over, and"
    )
    print("    vLLM's time to first token less its prefill (means), so the token's way back is in it")


def until_scheduled(figures: Mapping[str, Any]) -> float:
    """Milliseconds from the start of the ensemble's last step to the engine's first scheduling, at most."""
    engine = figures["engine_ms"]
    return float(figures["steps_ms"]["hand-over"] + engine["first token"] - engine["prefill"])


def _show_statistics(target: str, kinds: Mapping[str, Any]) -> None:
    print(f"\n{target}: Triton's statistics over all clients' requests, ms a request")
    print("(these models answer from threads of their own: execute is the hand-over to them, not the work)")
    parts = ("queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms")
    rows = [
        [kind, model, int(of["requests"]), *(report.ms(of.get(part)) for part in parts)]
        for kind, figures in kinds.items()
        for model, of in figures["triton"].items()
    ]
    print(report.table(["request", "model", "requests", "queue", "input", "execute", "output"], rows))


def _show_encoder_calls(target: str, kinds: Mapping[str, Any]) -> None:
    print(f"\n{target}: encoder calls while measured")
    rows: list[list[object]] = []
    for kind, figures in kinds.items():
        of = figures["graph_counters"]
        mean_ms = 1000 * of["call_seconds"] / of["calls"] if of["calls"] else None
        rows.append([kind, *(int(of[name]) for name in ("hits", "misses", "graphs")), report.ms(mean_ms)])
    print(report.table(["request", "replayed", "eager", "captured meanwhile", "mean ms a call"], rows))
