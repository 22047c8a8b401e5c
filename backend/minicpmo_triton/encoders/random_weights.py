"""Both encoders with seeded random weights, for measurements and tests without a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from minicpmo_triton.encoders import audio, vision
from minicpmo_triton.encoders.audio import AudioModule
from minicpmo_triton.encoders.vision import VisionModule

# MiniCPM-o 4.5's dimensions.
VISION = (
    vision.VisionConfig(hidden_size=4096, query_num=64, drop_vision_last_layer=False),
    vision.TowerConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_attention_heads=16,
        num_hidden_layers=27,
        image_size=980,
        patch_size=14,
    ),
)
AUDIO = (
    audio.AudioConfig(hidden_size=4096, audio_pool_step=5, audio_chunk_length=1.0),
    audio.TowerConfig(
        d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096, num_mel_bins=80
    ),
)


def _fill(module: nn.Module, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
    """Draw weights that keep activations near unit size, so that errors show as in a trained model."""
    module.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                # The 1-D weights are those of layer norms; everything else of one dimension is a bias.
                parameter.normal_(float(name.endswith("weight")), 0.05, generator=generator)


def write_random_checkpoint(published: Path, out: Path, device: torch.device | str = "cpu") -> None:
    """A checkpoint folder of full size: ``published``'s JSON files, and random encoders in bfloat16.

    ``published`` is the published checkpoint's folder, with or without its weights. The language model
    is left out: serve it with vLLM's ``{"load_format": "dummy"}``.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in (*published.glob("*.json"), *published.glob("*.jinja"), *published.glob("*.txt")):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    tensors: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        modules: list[nn.Module] = [VisionModule(*VISION), AudioModule(*AUDIO)]
    for seed, module in enumerate(modules):
        _fill(module, torch.bfloat16, device, seed)
        tensors |= {name: p.detach().cpu() for name, p in module.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def random_vision_module(
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    config: tuple[vision.VisionConfig, vision.TowerConfig] = VISION,
) -> VisionModule:
    """Tower and resampler, by default at full size (about 0.5 G parameters), ready to run."""
    with torch.device("meta"):
        module = VisionModule(*config)
    _fill(module, dtype, device, seed)
    return module.prepare()


def random_audio_module(
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    config: tuple[audio.AudioConfig, audio.TowerConfig] = AUDIO,
) -> AudioModule:
    """Audio tower and projection, by default at full size (about 0.3 G parameters), ready to run."""
    with torch.device("meta"):
        module = AudioModule(*config)
    _fill(module, dtype, device, seed)
    return module.prepare()
