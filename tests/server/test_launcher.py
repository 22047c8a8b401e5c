"""A server leaves nothing behind: not when it is asked to stop, not when it fails, not when interrupted."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minicpmo_triton.errors import Unavailable
from minicpmo_triton.launcher import TritonServer

from .conftest import server_options
from .leftovers import MARK, Leftovers

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


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


def test_ended_serve_leaves_nothing_and_says_so(tiny_checkpoint: Path, leftovers: Leftovers) -> None:
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    process = subprocess.Popen(
        [sys.executable, "-m", "minicpmo_triton.cli", "serve", f"--checkpoint={tiny_checkpoint}", *ports],
        env=leftovers.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_line(process, "preprocess is loaded")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("minicpmo-triton: stopped\n")
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
