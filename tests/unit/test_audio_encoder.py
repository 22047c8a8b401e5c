"""The audio encoder against the goldens and against plain restatements of its parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.encoders import random_weights
from minicpmo_triton.encoders.audio import (
    AudioModule,
    num_positions,
    num_tokens,
    read_audio_config,
    visible_ends,
)
from minicpmo_triton.encoders.batching import AudioEncoder, AudioItem
from minicpmo_triton.encoders.kernels import MASK_ALIGNMENT, additive_mask
from minicpmo_triton.errors import CheckpointError

#: Seen: 5e-7 in float32. An error as small as the other form of GELU, or another epsilon, is over 1e-5.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def module(tiny_checkpoint: Path) -> AudioModule:
    return AudioModule.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu")


def random_inputs(batch: int, num_frames: int, seed: int = 0) -> dict[str, torch.Tensor]:
    mel = torch.randn(batch, num_frames, 80, generator=torch.Generator().manual_seed(seed))
    return {"mel": mel, "visible_end": visible_ends(num_positions(num_frames), 50)}


@pytest.mark.parametrize("name", ["audio", "audio_speech", "image_and_audio"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_reproduce_the_goldens(
    name: str,
    dtype: torch.dtype,
    tiny_checkpoint: Path,
    golden_arrays: Callable[[str], Mapping[str, np.ndarray]],
) -> None:
    encoder = AudioEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), dtype, "cpu")
    arrays = golden_arrays(name)
    mel = arrays["mel_0"].T
    (embeds,) = encoder.encode([AudioItem(mel, np.array([len(mel)], np.int32))])
    assert isinstance(embeds, torch.Tensor)
    assert embeds.dtype == dtype
    expected = torch.from_numpy(arrays["audio_embeds_0"])
    assert embeds.shape == expected.shape
    assert relative_error(embeds, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_frames", [9, 101, 602])
def test_a_chunk_is_the_same_alone_and_in_a_batch(num_frames: int, module: AudioModule) -> None:
    inputs = random_inputs(8, num_frames)
    with torch.inference_mode():
        together = module(**inputs)
        for index in range(8):
            alone = module(inputs["mel"][index : index + 1], inputs["visible_end"])
            assert relative_error(alone[0], together[index]) < 1e-6


def test_forward_traces_without_reading_a_value(module: AudioModule) -> None:
    inputs = random_inputs(2, 143)
    exported = torch.export.export(module, (), inputs, strict=True).module()
    assert relative_error(exported(**inputs), module(**inputs)) < 1e-6


@pytest.mark.parametrize("num_frames", [9, 10, 143, 602, 2999, 3000])
def test_the_output_has_the_tokens_that_are_foretold(num_frames: int, module: AudioModule) -> None:
    with torch.inference_mode():
        output = module(**random_inputs(1, num_frames))
    assert output.shape == (1, num_tokens(num_frames, 5), 128)


def test_convolutions_and_pooling_are_torchs(module: AudioModule) -> None:
    mel = torch.randn(2, 143, 80)
    with torch.inference_mode():
        x = F.gelu(F.conv1d(mel.mT, module.apm.conv1.weight, module.apm.conv1.bias, padding=1))
        x = F.gelu(F.conv1d(x, module.apm.conv2.weight, module.apm.conv2.bias, stride=2, padding=1)).mT
        x = x + module.apm.embed_positions.weight[: x.shape[1]]
        ends = visible_ends(72, 50)
        mask = torch.zeros(72, 72).masked_fill(torch.arange(72) >= ends[:, None], -torch.inf)
        for layer in module.apm.layers:
            x = x + layer.self_attn(layer.self_attn_layer_norm(x), mask)
            x = x + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
        projection = module.audio_projection_layer
        x = projection.linear2(F.relu(projection.linear1(module.apm.layer_norm(x))))
        expected = F.avg_pool1d(x.mT, 5, 5).mT
        assert relative_error(module(mel, ends), expected) < 1e-5


def test_a_position_sees_its_block_and_those_before() -> None:
    ends = visible_ends(123, 50)
    assert ends.dtype == torch.int32
    assert ends[[0, 49, 50, 99, 100, 122]].tolist() == [50, 50, 100, 100, 150, 150]


@pytest.mark.parametrize("length", [1, 5, 50, 51, 123])
def test_the_additive_mask_hides_what_comes_later(length: int) -> None:
    ends = visible_ends(length, 50)
    mask = additive_mask(ends, torch.bfloat16)
    assert mask.shape == (1, 1, length, length)
    assert mask.stride(-2) % MASK_ALIGNMENT == 0  # SDPA's kernels take it as it is
    for row, end in zip(mask[0, 0], ends.tolist(), strict=True):
        assert (row[:end] == 0).all()
        assert row[end:].isneginf().all()


def test_later_audio_does_not_reach_earlier_blocks(module: AudioModule) -> None:
    inputs = random_inputs(1, 400)
    changed = inputs["mel"].clone()
    changed[:, 203:] += 1.0  # the convolutions see 3 frames ahead; block 2 starts at frame 200
    with torch.inference_mode():
        before = module(**inputs)
        after = module(changed, inputs["visible_end"])
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(dim=-1).all()


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("", "audio_pool_step", 0),
        ("", "audio_chunk_length", 0.01),
        ("audio_config", "num_mel_bins", 128),
        ("audio_config", "max_source_positions", 1000),
        ("audio_config", "activation_function", "relu"),
        ("audio_config", "encoder_attention_heads", 7),
    ],
)
def test_a_config_computed_otherwise_is_refused(
    section: str, field: str, value: object, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (config[section] if section else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field):
        read_audio_config(Checkpoint(tmp_path))


def test_random_weights_have_the_published_dimensions(fixtures_dir: Path) -> None:
    published = fixtures_dir.parent / "minicpm-o-4_5"
    if not published.is_dir():
        pytest.skip("the published config.json is not at hand")
    assert read_audio_config(Checkpoint(published)) == random_weights.AUDIO


def test_random_weights_run() -> None:
    config, tower = random_weights.AUDIO
    small = type(config)(128, 5, 1.0), type(tower)(32, 1, 2, 64, 80)
    module = random_weights.random_audio_module(torch.float32, "cpu", config=small)
    assert module(**random_inputs(2, 50)).isfinite().all()
