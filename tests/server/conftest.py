"""One real tritonserver with a real vLLM engine on the tiny checkpoint, started once a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minicpmo_client import Client
from minicpmo_triton.launcher import ServerOptions, TritonServer

from .leftovers import Leftovers

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
#: Positions of the engine's context in these tests; small, so that a test can exceed it.
MAX_MODEL_LEN = 16384
#: Tokens of an answer that nobody waits for: over half a minute where nothing else runs.
MANY_TOKENS = 15000
ENGINE_ARGS = {"max_model_len": MAX_MODEL_LEN, "enforce_eager": True}  # compiling takes a minute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)


def server_options(checkpoint: Path) -> ServerOptions:
    """A server on free ports in float32, as the goldens are."""
    return ServerOptions(
        REPOSITORY,
        str(checkpoint),
        dtype="float32",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        ready_timeout_s=300,
        environment={"MINICPMO_ENGINE_ARGS": json.dumps(ENGINE_ARGS)},
    )


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path) -> Iterator[TritonServer]:
    lines: list[str] = []
    running = TritonServer(server_options(tiny_checkpoint), on_line=lines.append)
    try:
        running.__enter__()
    except BaseException:
        print("".join(lines[-200:]))  # the log of a failed start is what explains it
        raise
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout_s=120) as opened:
        yield opened


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    """What a server that the test starts must not leave behind."""
    run = Leftovers()
    yield run
    run.end_processes()
