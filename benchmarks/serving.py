"""A checkpoint and a tritonserver for a measurement."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton_grpc

from benchmarks.requests import KINDS
from minicpmo_triton.cli import default_repository
from minicpmo_triton.encoders.batching import MAX_BATCH, power_of_two_batches
from minicpmo_triton.encoders.random_weights import write_random_checkpoint
from minicpmo_triton.launcher import ServerOptions, TritonServer
from minicpmo_triton.schema import MEL_BINS, PATCH_VALUES
from minicpmo_triton.tiny_checkpoint import write_tiny_checkpoint

#: Prefix caching off, so that every prompt is computed; the rest as in ``model_repository``.
ENGINE_ARGS = {"gpu_memory_utilization": 0.75, "max_model_len": 8192, "enable_prefix_caching": False}
TINY_ENGINE_ARGS = {"max_model_len": 4096, "enable_prefix_caching": False, "enforce_eager": True}


def random_checkpoint(published: Path, out: Path) -> Path:
    """A full-size checkpoint with random encoders at ``out``; serve it with ``load_format`` dummy."""
    write_random_checkpoint(published, out, "cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return out


def tiny_checkpoint(out: Path) -> Path:
    """A tiny checkpoint of the published layout at ``out``."""
    write_tiny_checkpoint(out)
    return out


def derived_repository(target: Path, parameters: Mapping[str, str]) -> Path:
    """A copy of the model repository at ``target`` with these parameters, wherever a model has them."""
    shutil.copytree(default_repository(), target, ignore=shutil.ignore_patterns("__pycache__"))
    for config in target.glob("*/config.pbtxt"):
        text = config.read_text()
        for name, value in parameters.items():
            pattern = rf'(key: "{name}" value: {{ string_value: )"[^"]*"'
            text = re.sub(pattern, rf'\g<1>"{value}"', text)
        config.write_text(text)
    return target


@contextmanager
def serving(
    checkpoint: Path, repository: Path, engine_args: Mapping[str, Any], dtype: str, trace_file: Path
) -> Iterator[TritonServer]:
    """The server with tracing at hand but off; its last lines are shown where it does not come up."""
    options = ServerOptions(
        repository,
        str(checkpoint),
        dtype=dtype,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment={"MINICPMO_ENGINE_ARGS": json.dumps(dict(engine_args))},
        extra_arguments=(
            *("--model-control-mode=explicit", "--load-model=*"),  # the encoders are loaded once more
            *(
                argument
                for setting in (f"triton,file={trace_file}", "level=OFF", "rate=1", "count=-1")
                for argument in ("--trace-config", setting)
            ),
        ),
    )
    server = TritonServer(options, on_event=say)
    try:
        server.__enter__()
    except BaseException:
        print("\n".join(server.tail), file=sys.stderr)
        raise
    try:
        yield server
    finally:
        server.stop()


def switch_graphs(triton: Any, enabled: bool) -> None:
    """Load both encoders again with their graphs on or off; the language model stays."""
    for model in ("vision_encoder", "audio_encoder"):
        config = triton.get_model_config(model, as_json=True)["config"]
        config["parameters"]["encoder_cuda_graph"] = {"string_value": json.dumps(enabled)}
        triton.load_model(model, config=json.dumps(config))


def capture_batches(triton: Any, kinds: Sequence[str]) -> None:
    """Have every batch captured that the encoders can make of these requests' slices and chunks."""
    sizes = [MAX_BATCH >> shift for shift in range(MAX_BATCH.bit_length())]
    assert all(power_of_two_batches(size) == [size] for size in sizes)
    for size in sizes:
        for _ in range(2):  # the second call captures
            if any(KINDS[kind].image_side for kind in kinds):  # all of 32 x 32 patches
                patches = np.zeros((size * 1024, PATCH_VALUES), np.uint8)
                _call(triton, "vision_encoder", patches=patches, grid_sizes=np.full((size, 2), 32, np.int32))
            for frames in {round(100 * KINDS[kind].audio_s) for kind in kinds} - {0}:
                mel = np.zeros((size * frames, MEL_BINS), np.float32)
                _call(triton, "audio_encoder", mel=mel, mel_lengths=np.full(size, frames, np.int32))


def _call(triton: Any, model: str, **arrays: Any) -> None:
    inputs = []
    for name, array in arrays.items():
        kind = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}[array.dtype.name]
        tensor = triton_grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    triton.infer(model, inputs)


def say(line: str) -> None:
    """Progress, apart from the result."""
    print(f"benchmark: {line}", file=sys.stderr, flush=True)
