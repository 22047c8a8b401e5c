"""Full-size encoders with random weights on a real tritonserver."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from minicpmo_triton.encoders.random_weights import write_random_checkpoint
from minicpmo_triton.launcher import ServerOptions, TritonServer

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
ENCODERS = ("vision_encoder", "audio_encoder")

#: A model whose forward waits for the device, which no capture survives.
BROKEN_MODEL = """\
import torch
from minicpmo_triton.triton.encoder import VisionEncoderModel


class TritonPythonModel(VisionEncoderModel):
    def _wrap(self, forward):
        def waits_for_the_device(inputs):
            output = forward(inputs)
            output.sum().item()
            return output

        return super()._wrap(waits_for_the_device)
"""


@pytest.fixture(scope="session")
def full_size_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    published = Path(
        os.environ.get("MINICPMO_PUBLISHED") or REPOSITORY.parents[1] / "shared" / "minicpm-o-4_5"
    )
    if not published.is_dir():
        pytest.skip("the published configuration is not at hand (set MINICPMO_PUBLISHED to its folder)")
    out = tmp_path_factory.mktemp("full-size")
    write_random_checkpoint(published, out, "cuda")
    torch.cuda.empty_cache()
    return out


@pytest.fixture(scope="module")
def serve(
    full_size_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., TritonServer]]:
    """Start a server with the two encoders (and one that cannot be captured), ``num_instances`` each."""
    with ExitStack() as stack:

        def start(num_instances: int, **parameters: str) -> TritonServer:
            repository = tmp_path_factory.mktemp("repository")
            for model in ENCODERS:
                shutil.copytree(REPOSITORY / model, repository / model)
            shutil.copytree(REPOSITORY / "vision_encoder", repository / "broken")
            (repository / "broken" / "1" / "model.py").write_text(BROKEN_MODEL)
            for config in repository.glob("*/config.pbtxt"):
                text = config.read_text().replace("count: 1", f"count: {num_instances}")
                text = text.replace('name: "vision_encoder"', f'name: "{config.parent.name}"')
                for name, value in parameters.items():
                    start_of_value = text.index(f'key: "{name}"')
                    head, tail = text[:start_of_value], text[start_of_value:]
                    old = tail.split('string_value: "', 1)[1].split('"', 1)[0]
                    text = head + tail.replace(f'string_value: "{old}"', f'string_value: "{value}"', 1)
                config.write_text(text)
            options = ServerOptions(
                repository,
                str(full_size_checkpoint),
                dtype="bfloat16",
                http_port=0,
                grpc_port=0,
                metrics_port=0,
                ready_timeout_s=300,
            )
            lines: list[str] = []
            server = TritonServer(options, on_line=lines.append)
            try:
                return stack.enter_context(server)
            except BaseException:
                print("".join(lines[-120:]))
                raise

        yield start
