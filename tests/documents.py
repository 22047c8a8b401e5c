"""Read the documents: their fenced blocks and tables, so that tests can hold what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``place`` names it in failures."""

    place: str
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a document, by its path in the repository."""
    text = (ROOT / document).read_text()
    return [
        Block(f"{document}:{text.count(chr(10), 0, m.start()) + 1}", m[1], m[2])
        for m in _BLOCK.finditer(text)
    ]


def table(document: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading, by the names of its columns, without code marks."""
    _, found, below = (ROOT / document).read_text().partition(f"\n{heading}\n")
    assert found, f"{document} has no heading {heading!r}"
    lines = [line for line in re.split(r"\n#+ ", below)[0].splitlines() if line.startswith("|")]
    first, rule, *rest = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert set("".join(rule)) <= set("-| ")
    rows = [dict(zip(first, row, strict=True)) for row in rest if len(row) == len(first)]
    return [{name: value.strip("`") for name, value in row.items()} for row in rows]
