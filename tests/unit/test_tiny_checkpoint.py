"""The tiny checkpoint is the one the goldens were computed on, byte for byte."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from minicpmo_triton.tiny_checkpoint import write_tiny_checkpoint

WEIGHTS_SHA256 = "284e0041ae35c9eef30a31cb82b494650e2d7efaa17a40bf47c54f55cd8099b6"


def test_weights_have_the_digest_of_the_goldens(tiny_checkpoint: Path) -> None:
    digest = hashlib.sha256((tiny_checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert digest == WEIGHTS_SHA256


def test_every_file_equals_the_fixture_scripts(
    tiny_checkpoint: Path, fixtures_dir: Path, tmp_path: Path
) -> None:
    script = fixtures_dir / "make_tiny_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    expected = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()} == expected


def test_an_existing_folder_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("stale")
    write_tiny_checkpoint(tmp_path)
    assert (tmp_path / "config.json").read_text().startswith("{")


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError):
        write_tiny_checkpoint(tmp_path / "taken")
