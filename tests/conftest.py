"""Fixtures every test may use: the shared goldens and media, and a tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Let signals reach the programs under test: those of a shell's background and of nohup ignore some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of goldens and media, beside the checkout or where MINICPMO_FIXTURES says."""
    path = Path(os.environ.get("MINICPMO_FIXTURES") or REPOSITORY.parent / "shared" / "fixtures")
    if not path.is_dir():
        pytest.skip("the goldens are not at hand (set MINICPMO_FIXTURES to their folder)")
    return path


@pytest.fixture(scope="session")
def media_dir(fixtures_dir: Path) -> Path:
    return fixtures_dir / "media"


@pytest.fixture(scope="session")
def goldens(fixtures_dir: Path) -> dict[str, Any]:
    """Case name -> ``{"request": …, "expected": …}``."""
    cases: dict[str, Any] = json.loads((fixtures_dir / "goldens" / "cases.json").read_text())
    return cases


@pytest.fixture(scope="session")
def golden_arrays(fixtures_dir: Path) -> Callable[[str], Mapping[str, np.ndarray]]:
    """Case name -> its arrays."""
    return lambda name: dict(np.load(fixtures_dir / "goldens" / f"{name}.npz"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of the published layout, written once a session."""
    from minicpmo_triton.tiny_checkpoint import write_tiny_checkpoint

    path = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(path)
    return path


_REPORT = pytest.StashKey[list[str]]()


@pytest.fixture
def report_line(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a line of measurements to the end of the test report."""
    lines = request.config.stash.setdefault(_REPORT, [])
    return lines.append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(_REPORT, [])
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
