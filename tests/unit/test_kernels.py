"""The choice of kernels on a CPU, and the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minicpmo_triton.encoders import kernels, random_weights
from minicpmo_triton.encoders.audio import visible_ends
from minicpmo_triton.encoders.kernels import PLAIN, KernelChoice

EVERYTHING = KernelChoice(add_norm=True, fused_gelu=True, attention="triton", stem=True)


def test_the_kernels_compute_what_torch_does() -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    pytest.importorskip("triton", reason="Triton (the language) is not installed")
    script = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    result = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_computes_the_plain_way_whatever_is_chosen(dtype: torch.dtype) -> None:
    config, tower = random_weights.AUDIO
    small = type(config)(128, 5, 1.0), type(tower)(32, 2, 2, 64, 80)
    module = random_weights.random_audio_module(dtype, "cpu", config=small)
    inputs = {"mel": torch.randn(2, 143, 80), "visible_end": visible_ends(72, 50)}
    plain = module(**inputs)
    assert module.use_kernels(EVERYTHING) is EVERYTHING
    assert module.apm.layers[0].self_attn.kernels is EVERYTHING
    assert torch.equal(module(**inputs), plain)


def test_what_does_not_run_falls_back_to_plain(caplog: pytest.LogCaptureFixture) -> None:
    part = kernels.Switchable()

    def trial() -> None:
        if part.kernels != PLAIN:
            raise RuntimeError("no C compiler")

    assert kernels.use_kernels(part, EVERYTHING, trial) is PLAIN
    assert part.kernels is PLAIN
    assert "no C compiler" in caplog.text


def test_an_error_of_the_plain_form_is_raised() -> None:
    def trial() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        kernels.use_kernels(kernels.Switchable(), EVERYTHING, trial)


def test_pixels_are_scaled_and_padded() -> None:
    pixels = kernels.scale_patches(torch.tensor([[0, 51, 255]], dtype=torch.uint8), 5, torch.float32, PLAIN)
    assert torch.allclose(pixels, torch.tensor([[-1, -0.6, 1, 0, 0]]), atol=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", [1, 6, 7])
def test_windows_are_what_a_convolution_reads(stride: int, length: int) -> None:
    x, weight = torch.randn(2, length, 4), torch.randn(5, 4, 3)
    windows = kernels.windows(x, stride, torch.float32, replace(PLAIN, stem=True))
    got = windows @ weight.transpose(1, 2).flatten(1).T
    assert torch.allclose(got, F.conv1d(x.mT, weight, stride=stride, padding=1).mT, atol=1e-5)
