"""The model repository as one server runs it.

The repository as it stands carries embeddings in bfloat16, which is what the models compute on a
GPU. In float32 (a CPU, or ``MINICPMO_DTYPE=float32``) the same tensors are declared FP32, so that
nothing is rounded between the models; Triton has no way to leave that open in config.pbtxt.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from minicpmo_triton.config import resolve_dtype

_EMBEDS_LINE = re.compile(r'(name: "\w+_embeds" data_type: )TYPE_\w+')


def derive_repository(source: Path, target: Path, dtype: str) -> Path:
    """``source`` where it serves ``dtype`` as it stands, else a copy under ``target`` that does."""
    import torch  # seconds to import, and only this needs it

    if resolve_dtype(dtype, torch.cuda.is_available()) == "bfloat16":
        return source
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for config in target.glob("*/config.pbtxt"):
        config.write_text(_EMBEDS_LINE.sub(r"\1TYPE_FP32", config.read_text()))
    return target
