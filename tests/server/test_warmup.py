"""``model_warmup`` lines that ``minicpmo-triton shapes`` prints are taken by a real tritonserver."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from minicpmo_triton import shapes
from minicpmo_triton.launcher import TritonServer
from tests.scrape import settled, total

from .conftest import REPOSITORY, server_options


def test_warmup_calls_each_shape_twice_at_load(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for model in ("vision_encoder", "audio_encoder"):
        shutil.copytree(REPOSITORY / model, tmp_path / model)
    printed = shapes.write_warmup(tmp_path, [shapes.ImageSize(448, 448)], [shapes.Clip(1)], 9)
    for section in printed.split("# ")[1:]:
        name, lines = section.split("/config.pbtxt\n", 1)
        with (tmp_path / name / "config.pbtxt").open("a") as config:
            config.write(lines)
    with TritonServer(replace(server_options(tiny_checkpoint), model_repository=tmp_path)) as server:
        samples = settled(server.metrics_url, "minicpmo_encoder")
    for model in ("vision_encoder", "audio_encoder"):
        assert total(samples, "minicpmo_encoder_graph_misses_total", model=model) == 2
        assert total(samples, "minicpmo_encoder_items_total", model=model) == 2
