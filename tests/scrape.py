"""Read Triton's metrics endpoint."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of the endpoint."""

    name: str
    labels: Mapping[str, str]
    value: float


def scrape(url: str) -> list[Sample]:
    """Every sample that the endpoint at ``url`` shows."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found = (_LINE.match(line) for line in text.splitlines())
    return [Sample(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """Sum of the samples of this name that carry these labels."""
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def settled(url: str, prefix: str) -> list[Sample]:
    """Every sample, once those whose names begin with ``prefix`` have stopped moving: figures follow an
    answer by a moment."""
    samples = scrape(url)
    while True:
        time.sleep(0.2)
        before, samples = samples, scrape(url)
        if _values(before, prefix) == _values(samples, prefix):
            return samples


def _values(samples: list[Sample], prefix: str) -> list[float]:
    return [sample.value for sample in samples if sample.name.startswith(prefix)]
