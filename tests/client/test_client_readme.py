"""The README's examples run: Python with fakes in place of the server, commands through the parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minicpmo_client
from minicpmo_client import AsyncClient, AsyncFakeTransport, Client, FakeTransport, cli
from minicpmo_client.stats import parse_metrics

README = (Path(__file__).parents[2] / "client" / "README.md").read_text()
METRICS = 'minicpmo_encoder_graph_hits_total{model="vision_encoder",instance="vision_encoder_0"} 3'
FILES = ("cat.jpg", "purr.wav", "street.mp4")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def in_a_folder_with_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).write_bytes(name.encode())


def test_the_python_examples(
    in_a_folder_with_media: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.zeros((64, 8), np.float32)
    fake = FakeTransport(["Some", "thing."], tensors={"image_embeds": rows, "audio_embeds": rows})
    async_fake = AsyncFakeTransport(["Some", "thing."])

    class FakeClient(Client):
        def __init__(self, url: str = "", *, transport: Any = fake) -> None:
            super().__init__(url or "localhost:8001", transport=transport)

        def stats(self, timeout_s: float = 1.0) -> Any:
            return parse_metrics(METRICS)

    class FakeAsyncClient(AsyncClient):
        def __init__(self, url: str) -> None:
            super().__init__(url, transport=async_fake)

    monkeypatch.setattr(minicpmo_client, "Client", FakeClient)
    monkeypatch.setattr(minicpmo_client, "AsyncClient", FakeAsyncClient)
    scope: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), scope)
    output = capsys.readouterr().out
    assert output.startswith("Something.Something. None 2\n")
    assert "['Something.', 'Something.', 'Something.']" in output
    assert "[(64, 8), (64, 8)]\nvision_encoder_0 1.0 0 {}\n" in output
    assert fake.requests[0].inputs["image"] == [b"cat.jpg"]
    assert async_fake.requests[0].inputs["video"] == [b"street.mp4"]


def test_the_commands(in_a_folder_with_media: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.zeros((64, 8), np.float32)
    made: list[str] = []

    class FakeClient(Client):
        def stats(self, timeout_s: float = 1.0) -> Any:
            return parse_metrics(METRICS)

    def make(url: str, *, model: str) -> Client:
        made.append(url)
        fake = FakeTransport(["ok"], tensors={"image_embeds": rows, "audio_embeds": rows})
        return FakeClient(url, model=model, transport=fake)

    (script,) = blocks("sh")
    for line in script.splitlines():
        program, *argv = shlex.split(line)
        assert program == "minicpmo"
        assert cli.main(argv, make_client=make) == 0, line
    assert made[2] == "http://localhost:8000"
    with np.load("embeddings.npz") as saved:
        assert sorted(saved) == ["audio_0", "image_0"]
    assert "vision_encoder_0" in capsys.readouterr().out


def test_every_public_error_is_named() -> None:
    for name in minicpmo_client.__all__:
        if issubclass(getattr(minicpmo_client, name), Exception):
            assert f"`{name}`" in README
