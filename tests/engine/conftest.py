"""One engine with statistics and LoRA adapters for the tests of answers, caching and cancelling."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from minicpmo_triton.llm.engine import Engine, EngineStats, read_lora_adapters
from minicpmo_triton.llm.stats import merge
from tests.engine.helpers import Arrays, Make, maker

LAYERS, HIDDEN, RANK = 2, 128, 4
WIDTHS = {"q_proj": 128, "v_proj": 64}


@dataclass
class StatsLog:
    """Every record of the engine, with the time it came."""

    records: list[tuple[float, EngineStats]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, stats: EngineStats) -> None:
        with self.changed:
            self.records.append((time.perf_counter(), stats))
            self.changed.notify_all()

    def mark(self) -> int:
        return len(self.records)

    def since(self, mark: int) -> EngineStats:
        return merge([stats for _, stats in self.records[mark:]])

    def wait(self, condition: Callable[[EngineStats], bool], timeout_s: float = 30.0) -> float:
        """Wait until the newest record meets ``condition``; returns when it came (perf_counter)."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: bool(self.records) and condition(self.records[-1][1]), timeout_s
            ), f"the last record is {self.records[-1:]}"
            return self.records[-1][0]


def write_adapter(path: Path, scale: float = 1.0, prefix: str = "base_model.model.llm.") -> Path:
    """A PEFT adapter of rank 4 on q_proj and v_proj of the tiny checkpoint's language model."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in WIDTHS.items():
            module = f"{prefix}model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            tensors[f"{module}.lora_B.weight"] = scale * torch.randn(width, RANK, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(WIDTHS), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def stats_log() -> StatsLog:
    return StatsLog()


@pytest.fixture(scope="session")
def shared_engine(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, stats_log: StatsLog
) -> Iterator[Engine]:
    """With adapters ``whole`` (named as in the whole model), ``language`` (as in Qwen3), ``zero``."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llm")
    write_adapter(folder / "whole")
    write_adapter(folder / "language", prefix="base_model.model.")
    write_adapter(folder / "zero", scale=0.0)
    (folder / "multi_lora.json").write_text(
        json.dumps({name: name for name in ("whole", "language", "zero")})
    )
    args = {
        "enforce_eager": True,
        "max_model_len": 2048,
        "enable_lora": "true",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    adapters = read_lora_adapters(folder, args, {})
    engine = Engine.start(tiny_checkpoint, args, "float32", {}, lora_adapters=adapters, on_stats=stats_log)
    yield engine
    engine.shutdown()


@pytest.fixture
def make_shared(shared_engine: Engine, goldens: Mapping[str, Any], golden_arrays: Arrays) -> Make:
    """Make the generation of a golden case for the shared engine."""
    return maker(shared_engine, goldens, golden_arrays)
