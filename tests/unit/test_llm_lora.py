"""multi_lora.json is read when LoRA is enabled, and a wrong one fails the load with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from minicpmo_triton.errors import ConfigError
from minicpmo_triton.llm import lora
from minicpmo_triton.llm.lora import lora_requests, read_lora_adapters

ENABLED = {"enable_lora": True}


def write_adapter(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


def write_list(folder: Path, value: Any) -> None:
    (folder / "multi_lora.json").write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("enabled", [True, "true", "True"])
def test_paths_are_absolute_or_start_at_the_file(tmp_path: Path, enabled: bool | str) -> None:
    folder = tmp_path / "llm" / "1"
    near = write_adapter(folder / "near")
    far = write_adapter(tmp_path / "far")
    write_list(folder, {"near": "near", "up": "../../far", "far": str(far)})
    adapters = read_lora_adapters(folder, {"enable_lora": enabled}, {})
    assert adapters == {"near": near, "up": far, "far": far}
    requests = lora_requests(adapters)
    assert [(r.lora_name, r.lora_int_id, r.lora_path) for r in requests.values()] == [
        ("near", 1, str(near)),
        ("up", 2, str(far)),
        ("far", 3, str(far)),
    ]


@pytest.mark.parametrize(
    ("args", "env"),
    [
        ({}, {}),
        ({"enable_lora": False}, {}),
        ({"enable_lora": "false"}, {}),
        (ENABLED, {"MINICPMO_ENGINE_ARGS": '{"enable_lora": false}'}),
    ],
)
def test_nothing_is_read_without_lora(tmp_path: Path, args: dict[str, Any], env: dict[str, str]) -> None:
    write_list(tmp_path, "{")
    assert read_lora_adapters(tmp_path, args, env) == {}


def test_the_environment_enables_it_too(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_list(tmp_path, {"a": "a"})
    env = {"MINICPMO_ENGINE_ARGS": '{"enable_lora": true}'}
    assert list(read_lora_adapters(tmp_path, {}, env)) == ["a"]


def test_a_missing_file_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"multi_lora\.json cannot be read: No such file.*enable_lora"):
        read_lora_adapters(tmp_path, ENABLED, {})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object of adapter names and paths"),
        ('{"a": 1}', "must be a JSON object of adapter names and paths"),
        ('{"a": "here", "a": "here"}', "appears twice"),
        ('{"": "here"}', "has no name"),
        ('{"a": "nowhere"}', "a: .*nowhere has no adapter_config.json"),
        ('{"a": "empty"}', "a: .*empty has no adapter_model.safetensors"),
    ],
)
def test_a_malformed_file_fails_the_load(tmp_path: Path, value: str, problem: str) -> None:
    write_adapter(tmp_path / "here")
    write_adapter(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_model.safetensors").unlink()
    write_list(tmp_path, value)
    with pytest.raises(ConfigError, match=problem):
        read_lora_adapters(tmp_path, ENABLED, {})


@pytest.mark.parametrize(
    ("on_gpu", "args", "expected"),
    [
        (True, {}, {}),
        (True, ENABLED, {"max_loras": 1, "max_cpu_loras": 3}),
        (True, {**ENABLED, "max_loras": 8}, {"max_loras": 8, "max_cpu_loras": 8}),
        (True, {**ENABLED, "max_loras": 2, "max_cpu_loras": 2}, {"max_loras": 2, "max_cpu_loras": 2}),
        # On the CPU one slot stays empty: vLLM applies the last one to requests without an adapter.
        (False, {**ENABLED, "max_loras": 2}, {"max_loras": 4, "max_cpu_loras": 4}),
    ],
)
def test_every_adapter_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, args: dict[str, Any], expected: dict[str, int]
) -> None:
    monkeypatch.setattr(lora.torch.cuda, "is_available", lambda: on_gpu)
    adapters = {name: Path(name) for name in "abc"}
    assert lora.lora_engine_args(args, adapters) == expected
