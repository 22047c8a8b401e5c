"""What a benchmark prints: tables, where and with what it ran, and one line of JSON."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from minicpmo_triton.graphs.manager import installed_vllm


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side, the first to the left and the others to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def environment(name: str, argv: Sequence[str], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Card, driver, versions, date and the command of ``python -m benchmarks.<name>``."""
    on_gpu = device.type == "cuda"
    return {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "driver": _driver() if on_gpu else None,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": installed_vllm(),
        "python": platform.python_version(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return lines.split("\n")[0].strip() or None


def heading(about: dict[str, Any]) -> str:
    """The first line of a report."""
    driver = f", driver {about['driver']}" if about["driver"] else ""
    return (
        f"{about['date']}  {about['card']}{driver}, {about['dtype']}, torch {about['torch']}, {about['vllm']}"
    )


def json_line(result: dict[str, Any]) -> str:
    """One line; a number that is none is an error."""
    return json.dumps(result, allow_nan=False)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def ms(value: float | None) -> str:
    """Two decimals, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.2f}"


def ratio(above: float | None, below: float | None) -> str:
    return "-" if not above or not below else f"{above / below:.2f}"
