"""Imports go one way: triton -> (llm | encoders | media) -> graphs, config, schema, errors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "backend" / "minicpmo_triton"
#: Lower numbers may not import higher ones.
LAYERS = {"graphs": 1, "media": 2, "encoders": 2, "llm": 2, "triton": 4}
MODULE_LAYERS = {
    "preprocess": 3,
    "prompt": 2,
    "tokenizer": 2,
    "request": 2,
    "checkpoint": 1,
    "tiny_checkpoint": 1,
}
TOP = {"cli": 5, "doctor": 5, "launcher": 5, "repository": 5, "shapes": 5, "sessions": 5}
BASE = 0  # config, schema, errors


def layer(module: str) -> int:
    """The layer of ``minicpmo_triton.<module>``."""
    head = module.split(".")[0]
    return {**LAYERS, **MODULE_LAYERS, **TOP}.get(head, BASE)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def test_no_module_imports_from_a_higher_layer() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imports(path)
        if target.startswith("minicpmo_triton.")
        and layer(target.removeprefix("minicpmo_triton.")) > layer(name)
    ]
    assert wrong == []


def test_only_the_llm_and_the_graph_manager_import_vllm() -> None:
    users = {name for name, path in modules() if any(t.split(".")[0] == "vllm" for t in imports(path))}
    assert all(name.startswith("llm.") or name == "graphs.manager" for name in users), users


def test_only_the_triton_layer_imports_the_python_backend() -> None:
    users = {name for name, path in modules() if "triton_python_backend_utils" in imports(path)}
    assert users
    assert all(name.startswith("triton.") for name in users), users


def test_importing_the_package_does_not_import_numba() -> None:
    """Its LLVM wrapper keeps vLLM 0.32 from starting on a CPU in a process that was spawned."""
    code = "import sys, minicpmo_triton.preprocess, minicpmo_triton.llm.engine; print('numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_every_module_is_seen() -> None:
    assert len(dict(modules())) > 15
