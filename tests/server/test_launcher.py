"""A server leaves nothing behind: not when it is asked to stop, not when it fails, not when interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minicpmo_triton.errors import Unavailable
from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.sessions import SHARED_MEMORY

from .conftest import server_options

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
MARK = "MINICPMO_TEST_RUN"


@dataclass
class Leftovers:
    """What a run started after this object was made has left: its processes and its shared memory."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir(SHARED_MEMORY)))

    @property
    def environment(self) -> dict[str, str]:
        """Every child inherits this, whichever session it moves to."""
        return {**os.environ, MARK: self.mark}

    def processes(self) -> list[int]:
        marked = f"{MARK}={self.mark}".encode()
        return [
            int(p.name)
            for p in Path("/proc").iterdir()
            if p.name.isdigit() and marked in _read(p / "environ")
        ]

    def shared_memory(self) -> set[str]:
        """New regions that no living process maps (other servers of this machine map theirs)."""
        new = set(os.listdir(SHARED_MEMORY)) - self.before
        mapped = (
            b"".join(_read(p / "maps") for p in Path("/proc").iterdir() if p.name.isdigit()) if new else b""
        )
        return {name for name in new if f"{SHARED_MEMORY}/{name}".encode() not in mapped}

    def assert_none(self) -> None:
        deadline = time.monotonic() + 5
        while (self.processes() or self.shared_memory()) and time.monotonic() < deadline:
            time.sleep(0.1)  # a killed process takes a moment to be gone
        assert self.processes() == []
        assert self.shared_memory() == set()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # the process has ended


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    run = Leftovers()
    yield run
    for pid in run.processes():  # only ours carry the mark
        os.kill(pid, signal.SIGKILL)


def run_demo(leftovers: Leftovers) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), "--max-tokens", "8"],
        env=leftovers.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the demo ended without printing {text!r}")


def test_demo_answers_and_leaves_nothing(leftovers: Leftovers) -> None:
    process = run_demo(leftovers)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "first token after" in output
    assert "8 tokens in" in output
    leftovers.assert_none()


@pytest.mark.parametrize(
    ("line", "number"),
    [("starting tritonserver", signal.SIGINT), ("llm is loaded", signal.SIGTERM)],
)
def test_interrupted_demo_leaves_nothing(line: str, number: signal.Signals, leftovers: Leftovers) -> None:
    process = run_demo(leftovers)
    wait_for_line(process, line)
    if number == signal.SIGINT:
        time.sleep(8)  # in the middle of the load, with stubs and the engine under way
    process.send_signal(number)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 130, output
    leftovers.assert_none()


def test_killed_launcher_takes_the_server_along(leftovers: Leftovers) -> None:
    process = run_demo(leftovers)
    wait_for_line(process, "preprocess is loaded")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 90
    while leftovers.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    leftovers.assert_none()


def test_model_that_fails_to_load_is_named_with_its_reason(
    tiny_checkpoint: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    tensors: dict[str, torch.Tensor] = load_file(broken / "model.safetensors")
    del tensors["llm.model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    options = server_options(broken)
    options = replace(options, environment={**options.environment, MARK: leftovers.mark})
    with pytest.raises(Unavailable, match=r"llm.*layers\.1\.mlp\.down_proj"), TritonServer(options):
        pass
    leftovers.assert_none()


def test_missing_checkpoint_is_named(tmp_path: Path, leftovers: Leftovers) -> None:
    options = server_options(tmp_path / "nowhere")
    environment = {**options.environment, MARK: leftovers.mark, "HF_HUB_OFFLINE": "1"}
    options = replace(options, environment=environment)
    with pytest.raises(Unavailable, match="nowhere"), TritonServer(options):
        pass
    leftovers.assert_none()
