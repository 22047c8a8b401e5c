"""``minicpmo-triton shapes``: the keys it prints are those the encoders' batching makes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from minicpmo_triton import cli, shapes
from minicpmo_triton.errors import ConfigError
from minicpmo_triton.media.audio import log_mel_chunks
from minicpmo_triton.shapes import Clip, ImageSize, Key

VISION, AUDIO = "vision_encoder", "audio_encoder"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ImageSize(448, 448), [Key(VISION, 1, 1024)]),
        (ImageSize(1344, 1344), [Key(VISION, 2, 1024), Key(VISION, 8, 1024)]),
        (ImageSize(200, 300), [Key(VISION, 1, 39 * 26)]),
        (Clip(1), [Key(AUDIO, 1, 100)]),
        (Clip(61), [Key(AUDIO, 2, 3000), Key(AUDIO, 1, 100)]),
        (Clip(30.05), [Key(AUDIO, 1, 3000)]),  # the tail is too short for a row
    ],
    ids=str,
)
def test_keys_of_one_request(request_: ImageSize | Clip, expected: list[Key]) -> None:
    assert shapes.keys(request_, max_slice_nums=9) == expected


def test_grids_are_those_of_the_goldens(goldens: dict[str, dict[str, dict[str, object]]]) -> None:
    sizes = {
        "image_sliced": ImageSize(512, 512),
        "image_wide_sliced": ImageSize(1600, 900),
        "image_small_upscaled": ImageSize(200, 300),
    }
    for name, size in sizes.items():
        assert [list(g) for g in shapes.slice_grids(size, 9)] == goldens[name]["expected"]["tgt_sizes"]


@pytest.mark.parametrize("seconds", [0.3, 1.43, 29.99, 30.0, 30.01, 30.09, 61.0])
def test_chunks_are_those_of_preprocessing(seconds: float) -> None:
    samples = np.zeros(round(seconds * 16000), np.float32)
    _, lengths = log_mel_chunks("audio[0]", samples)
    assert shapes.chunk_lengths(Clip(seconds)) == lengths.tolist()


@pytest.mark.parametrize("text", ["448", "448x", "0x448", "-1x4", "axb", "448X448"])
def test_image_size_is_strict(text: str) -> None:
    with pytest.raises(ConfigError, match="--image"):
        shapes.parse_image_size(text)


@pytest.mark.parametrize("text", ["0", "-1", "0.05", "nan", "inf", "x", ""])
def test_seconds_are_strict(text: str) -> None:
    with pytest.raises(ConfigError, match="--audio"):
        shapes.parse_seconds(text)


def test_command_counts_distinct_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["shapes", "--image", "448x448", "--image", "450x450", "--image", "1344x1344", "--audio", "1"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "image 1344x1344: 2 x 1024 patches, 8 x 1024 patches" in printed
    # 450x450 is over one slice's area, so it is cut in two beside the whole picture.
    wanted = {key for size in ("448x448", "450x450", "1344x1344") for key in keys_of(size)}
    assert f"vision_encoder needs encoder_cuda_graph_max_graphs = {len(wanted)}" in printed


def keys_of(size: str) -> list[Key]:
    return shapes.keys(shapes.parse_image_size(size), 9)


def test_command_wants_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shapes"]) == 1
    assert "--image" in capsys.readouterr().err


def test_warmup_files_fit_the_lines_printed(tmp_path: Path) -> None:
    printed = shapes.write_warmup(tmp_path, [ImageSize(448, 448), ImageSize(512, 512)], [Clip(5)], 9)
    sizes = {"TYPE_UINT8": 1, "TYPE_INT32": 4, "TYPE_FP32": 4}
    sections = re.split(r"^# (\w+)/config.pbtxt$", printed, flags=re.MULTILINE)[1:]
    for model, text in zip(sections[::2], sections[1::2], strict=True):
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert config.model_warmup
        for sample in config.model_warmup:
            assert (sample.batch_size, sample.count) == (1, 2)
            for spec in sample.inputs.values():
                kind = model_config_pb2.DataType.Name(spec.data_type)
                file = tmp_path / model / "warmup" / spec.input_data_file
                assert file.stat().st_size == sizes[kind] * int(np.prod(spec.dims))


def test_examples_in_the_repository_are_what_the_command_prints(tmp_path: Path) -> None:
    printed = shapes.write_warmup(tmp_path, [ImageSize(448, 448)], [Clip(5)], 9)
    sections = re.split(r"^# (\w+)/config.pbtxt\n", printed, flags=re.MULTILINE)[1:]
    repository = Path(__file__).resolve().parents[2] / "model_repository"
    for model, text in zip(sections[::2], sections[1::2], strict=True):
        config = (repository / model / "config.pbtxt").read_text()
        commented = "\n".join(line.removeprefix("# ") for line in config.splitlines())
        assert text.strip() in commented
