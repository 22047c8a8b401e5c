"""docs/api.md says what the code says; docs/architecture.md is one page with one picture."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from minicpmo_triton import errors, schema
from minicpmo_triton.llm import sampling
from minicpmo_triton.request import MediaParameters
from tests.documents import ROOT, blocks, table

API = "docs/api.md"
INPUTS = table(API, "## Inputs")
OUTPUTS = table(API, "## Outputs of minicpmo and llm")
BETWEEN = table(API, "## Tensors between the models")


def as_documented(tensor: schema.Tensor) -> tuple[str, str]:
    dtype = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
    return tensor.name, f"{dtype} {list(tensor.dims)}"


@pytest.mark.parametrize(
    ("rows", "tensors"),
    [
        (
            INPUTS,
            {
                tensor
                for model in (schema.MINICPMO, schema.MINICPMO_UNARY, schema.LLM)
                for tensor in model.inputs
                if tensor.name not in {encoded.name for encoded in schema.ENCODED}
            },
        ),
        (OUTPUTS, set(schema.ANSWER)),
        (
            BETWEEN,
            {
                tensor
                for model in (schema.PREPROCESS, schema.ENCODE, schema.VISION_ENCODER, schema.AUDIO_ENCODER)
                for tensor in (*model.inputs, *model.outputs)
            }
            - set(schema.MEDIA_INPUTS),
        ),
    ],
    ids=["inputs", "outputs", "between the models"],
)
def test_every_tensor_is_listed_with_its_type_and_an_example(
    rows: list[dict[str, str]], tensors: set[schema.Tensor]
) -> None:
    assert {(row["name"], row["type, shape"]) for row in rows} == set(map(as_documented, tensors))
    assert len(rows) == len(tensors)
    assert all(row["meaning"] and row["example"] for row in rows)


def test_every_model_is_listed() -> None:
    text = (ROOT / API).read_text().partition("\n## ")[0]
    for model in schema.MODELS:
        assert f"`{model.name}`" in text


def test_every_media_parameter_is_listed_with_its_default() -> None:
    rows = {row["key"]: row for row in table(API, "### media_parameters")}
    fields = dataclasses.fields(MediaParameters)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        row = rows[field.name]
        assert list(json.loads(row["example"])) == [field.name]
        default = "the checkpoint's" if field.default is None else json.dumps(field.default)
        assert row["default"].startswith(default), field.name


def test_every_sampling_parameter_is_listed_with_an_example_of_its_type() -> None:
    rows = {row["key"]: row for row in table(API, "### sampling_parameters")}
    assert set(rows) == {*sampling.ACCEPTED, sampling.LORA_NAME}
    for key, row in rows.items():
        example: dict[str, Any] = json.loads(row["example"])
        assert key in example
        for name, value in example.items():
            assert name == sampling.LORA_NAME or sampling.ACCEPTED[name].accepts(value), key
    section = (ROOT / API).read_text().partition("### sampling_parameters")[2].partition("\n## ")[0]
    for key in sampling.REFUSED:
        assert f"`{key}`" in section


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_error_code_is_listed() -> None:
    codes = {kind.code for kind in subclasses(errors.MiniCPMOError)}  # type: ignore[attr-defined]
    assert {row["Triton code"] for row in table(API, "## Errors")} == codes


@pytest.mark.parametrize("document", ["README.md", API])
def test_json_and_python_in_the_documents_can_be_read(document: str) -> None:
    for block in blocks(document):
        if block.language == "json":
            json.loads(block.text)
        if block.language == "python":
            compile(block.text, block.place, "exec")


def test_the_architecture_is_one_page_with_one_picture() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert len(text.splitlines()) < 100
    (picture,) = blocks("docs/architecture.md")
    life = text.partition("## A request's life")[2].partition("\n## ")[0]
    assert picture.text in life
    for model in schema.MODELS:
        assert f"`{model.name}`" in life, f"{model.name} is missing from a request's life"
    for module in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert (ROOT / "backend/minicpmo_triton" / module).is_file(), module
