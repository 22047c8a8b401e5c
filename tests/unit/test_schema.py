"""schema.py and the config.pbtxt files say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from minicpmo_triton import schema
from minicpmo_triton.repository import derive_repository

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
ENSEMBLES = ("encode", "minicpmo")


def read_config(name: str, repository: Path = REPOSITORY) -> Any:
    text = (repository / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def declared(tensors: Any) -> list[schema.Tensor]:
    types = model_config_pb2.DataType
    return [
        schema.Tensor(
            t.name,
            types.Name(t.data_type).removeprefix("TYPE_"),
            tuple(t.dims),
            optional=getattr(t, "optional", False),
        )
        for t in tensors
    ]


def test_every_model_of_the_repository_is_in_the_schema() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")}
    assert folders == {model.name for model in schema.MODELS}


@pytest.mark.parametrize("model", schema.MODELS, ids=lambda model: model.name)
def test_config_declares_the_tensors_of_the_schema(model: schema.Model) -> None:
    config = read_config(model.name)
    assert config.name == model.name
    assert config.max_batch_size == 0
    assert declared(config.input) == list(model.inputs)
    assert declared(config.output) == list(model.outputs)
    assert config.model_transaction_policy.decoupled == model.decoupled


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensemble_connects_every_tensor_of_every_step_under_its_own_name(name: str) -> None:
    models = {model.name: model for model in schema.MODELS}
    config = read_config(name)
    available = {tensor.name for tensor in models[name].inputs}
    for step in config.ensemble_scheduling.step:
        model = models[step.model_name]
        connected = {t.name for t in model.inputs} & available
        if model is schema.LLM:  # it gets the media encoded; the text only to echo it
            connected -= {t.name for t in schema.MEDIA_INPUTS if t is not schema.TEXT_INPUT}
        assert dict(step.input_map) == {name: name for name in connected}
        assert {t.name for t in model.inputs if not t.optional} <= connected
        assert dict(step.output_map) == {t.name: t.name for t in model.outputs}
        assert set(step.input_map.values()) <= available
        available |= set(step.output_map.values())
    assert {tensor.name for tensor in models[name].outputs} <= available


def test_float32_repository_differs_only_in_the_type_of_embeddings(tmp_path: Path) -> None:
    derived = derive_repository(REPOSITORY, tmp_path / "models", "float32")
    for model in schema.MODELS:
        given, made = read_config(model.name), read_config(model.name, derived)
        embeds = [t for t in (*made.input, *made.output) if t.name.endswith("_embeds")]
        for tensor in embeds:
            assert tensor.data_type == model_config_pb2.TYPE_FP32
            tensor.data_type = model_config_pb2.TYPE_BF16
        assert made == given
    assert (derived / "llm" / "1" / "model.json").is_file()


def test_bfloat16_serves_the_repository_as_it_stands(tmp_path: Path) -> None:
    assert derive_repository(REPOSITORY, tmp_path / "models", "bfloat16") == REPOSITORY


@pytest.mark.parametrize("name", ["preprocess", "vision_encoder", "audio_encoder", "llm", "minicpmo_unary"])
def test_model_py_is_one_import(name: str) -> None:
    lines = (REPOSITORY / name / "1" / "model.py").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("from minicpmo_triton.triton.")
    assert "import" in lines[0]
    assert "as TritonPythonModel" in lines[0]
