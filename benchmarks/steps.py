"""Where the time to a first token goes: Triton's traces and its statistics.

Triton's own "compute" of a model that answers from a thread of its own, as every model here does, ends when
``execute`` has taken the request over: it is the cost of the hand-over, not of the work. What a step of the
ensemble really took shows in the trace, where the next step starts once its inputs are there. Trace and
clients share one clock (CLOCK_MONOTONIC), so the steps add up to what the client saw.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import Answered

#: Step -> what it lasts from and to.
STEPS = {
    "arrive": "the client sends, until the ensemble starts",
    "preprocess": "until the encoders start",
    "encode": "until the llm model starts: the slower encoder, and the copies between processes",
    "hand-over": "until llm's execute has returned: embeddings checked, laid out and given to the engine",
    "engine": "until the client has the first token: scheduling, prefill, sampling and the way back",
}


@dataclass(frozen=True)
class Span:
    """One model's part in one request; nanoseconds."""

    start: int
    compute_end: int


def read_traces(path: Path) -> list[dict[str, Span]]:
    """Model -> span of every traced request to the whole pipeline, in the order they came in."""
    found: dict[int, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()):
        trace = found.setdefault(entry["id"], {"times": {}})
        trace |= {key: entry[key] for key in ("model_name", "parent_id") if key in entry}
        trace["times"] |= {stamp["name"]: stamp["ns"] for stamp in entry.get("timestamps", ())}
    requests: dict[int, dict[str, Span]] = {}
    for number, trace in found.items():
        times = trace["times"]
        if "model_name" in trace and "REQUEST_START" in times:
            span = Span(times["REQUEST_START"], times.get("COMPUTE_END", 0))
            requests.setdefault(trace.get("parent_id", number), {})[trace["model_name"]] = span
    complete = [
        r for r in requests.values() if {"minicpmo", "preprocess", "vision_encoder", "llm"} <= r.keys()
    ]
    return sorted(complete, key=lambda request: request["minicpmo"].start)


def split(answered: Answered, spans: Mapping[str, Span]) -> dict[str, float]:
    """Milliseconds of each of :data:`STEPS` in one request; they sum to its time to first token."""
    encoders = min(spans["vision_encoder"].start, spans["audio_encoder"].start)
    marks = [
        1e9 * answered.sent,
        spans["minicpmo"].start,
        encoders,
        spans["llm"].start,
        spans["llm"].compute_end,
        1e9 * answered.first,
    ]
    return {step: (end - start) / 1e6 for step, start, end in zip(STEPS, marks[:-1], marks[1:], strict=True)}


def breakdown(answered: Sequence[Answered], traces: Sequence[Mapping[str, Span]]) -> dict[str, float] | None:
    """Median of every step over the requests of one client; None where the trace has none of them."""
    splits = []
    for request in answered:
        inside = [t for t in traces if 1e9 * request.sent <= t["minicpmo"].start <= 1e9 * request.first]
        if len(inside) == 1:
            splits.append(split(request, inside[0]))
    if not splits:
        return None
    return {step: round(statistics.median(s[step] for s in splits), 3) for step in STEPS}


Totals = dict[str, dict[str, tuple[int, int]]]  # model -> part -> count, nanoseconds

_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def read_statistics(client: Any) -> Totals:
    """Triton's totals so far; ``client`` is tritonclient's."""
    return {
        model.name: {
            part: (getattr(model.inference_stats, part).count, getattr(model.inference_stats, part).ns)
            for part in _PARTS
        }
        for model in client.get_inference_statistics().model_stats
    }


def between(before: Totals, after: Totals) -> dict[str, dict[str, float]]:
    """Model -> requests, and milliseconds a request of each part, for models that had any."""
    result = {}
    for model, parts in after.items():
        row: dict[str, float] = {}
        for part, (count, ns) in parts.items():
            count_before, ns_before = before.get(model, {}).get(part, (0, 0))
            requests = count - count_before
            if requests:
                row["requests"] = requests
                row[f"{part}_ms"] = round((ns - ns_before) / requests / 1e6, 3)
        if row:
            result[model] = row
    return result
