"""What README.md and docs/api.md tell people to type does what they say."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minicpmo_triton.launcher import TritonServer
from tests.documents import Block, blocks, table
from tests.unit.video_files import seconds_video

API = "docs/api.md"
ALL = [*blocks("README.md"), *blocks(API)]
SHELL = [block for block in ALL if block.language == "sh"]
PYTHON = [block for block in ALL if block.language == "python"]
JSON = [block for block in ALL if block.language == "json"]
#: Added where an example says nothing of the answer's length: the tiny model goes on to the context's end.
SHORT = json.dumps({"max_tokens": 4})
#: For an answer that must come in parts: on a busy machine what follows quickly leaves together.
LONG = json.dumps({"max_tokens": 256})


@pytest.fixture
def folder(media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the documents speak of."""
    (tmp_path / "photo.jpg").write_bytes((media_dir / "coins.png").read_bytes())
    (tmp_path / "note.wav").write_bytes((media_dir / "front_center_16k.wav").read_bytes())
    (tmp_path / "street.mp4").write_bytes(seconds_video(1, with_sound=True))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def served(text: str, server: TritonServer) -> str:
    """``text`` with the ports of the server under test."""
    return text.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_commands(block: Block, server: TritonServer, folder: Path) -> None:
    """Each line with the shell, and the curl of this machine."""
    tools = Path(sys.executable).parent
    for line in served(block.text, server).splitlines():
        command = line.replace(".venv/bin/minicpmo chat", f"{tools}/minicpmo chat --url {server.grpc_url}")
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, env={**os.environ}
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "error" not in done.stdout, f"{line}\n{done.stdout}"
        if "cancel_request_id" not in line:
            assert done.stdout.strip(), line
        if "generate_stream" in line and "cancel_request_id" not in line:
            events = [json.loads(part.removeprefix("data: ")) for part in done.stdout.split("\n\n") if part]
            assert len(events) > 1
            assert all("text_output" in event for event in events)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python(block: Block, server: TritonServer, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", served(block.text, server)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def data_uri(kind: str, folder: Path) -> str:
    name = {"image": "photo.jpg", "audio": "note.wav", "video": "street.mp4"}[kind]
    return base64.b64encode((folder / name).read_bytes()).decode()


def generate(server: TritonServer, model: str, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Status and events of ``generate_stream``, which takes every request."""
    connection = http.client.HTTPConnection(server.http_url, timeout=120)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
    reply = connection.getresponse()
    parts = reply.read().decode().split("\n\n")
    connection.close()
    return reply.status, [json.loads(part.removeprefix("data: ")) for part in parts if part]


def member(example: str, folder: Path) -> dict[str, Any]:
    """The member of a body that an example shows, with a real file for its dots."""
    found: dict[str, Any] = json.loads(f"{{{example}}}")
    for kind, value in found.items():
        if isinstance(value, list):
            found[kind] = [item.replace("…", data_uri(kind, folder)) for item in value]
    return found


@pytest.mark.parametrize("row", table(API, "## Inputs"), ids=lambda row: row["name"])
def test_examples_of_inputs(row: dict[str, str], server: TritonServer, folder: Path) -> None:
    body = member(row["example"], folder)
    if row["name"] == "cancel_request_id":
        assert generate(server, "llm", body) == (200, [])
        return
    if "messages" not in body:
        body.setdefault("text_input", "What is this?")
    body.setdefault("sampling_parameters", LONG if row["name"] == "stream" else SHORT)
    model = "llm" if row["name"].startswith("return_") else "minicpmo"
    status, events = generate(server, model, body)
    assert (status, [event for event in events if "error" in event]) == (200, [])
    if model == "llm":
        assert row["name"].removeprefix("return_") in events[-1]
    if row["name"] == "exclude_input_in_output":
        assert events[0]["text_output"].startswith("What is this?")
    if row["name"] == "stream":
        assert len(events) > 1


#: Keys that the server under test refuses, since it serves neither; with the beginning of its reason.
NOT_SERVED = {
    "lora_name": "sampling_parameters.lora_name: LoRA feature is not enabled",
    "thinking_token_budget": "sampling_parameters",
}


@pytest.mark.parametrize("name", ["media_parameters", "sampling_parameters"])
def test_examples_of_parameters(name: str, server: TritonServer, folder: Path) -> None:
    for row in table(API, f"### {name}"):
        example = json.loads(row["example"])
        body = {"text_input": "Why?", "sampling_parameters": SHORT}
        if name == "media_parameters":
            body |= {"video": [data_uri("video", folder)], name: json.dumps(example)}
        else:
            body[name] = json.dumps({"max_tokens": 4, **example})
        status, events = generate(server, "minicpmo", body)
        if row["key"] in NOT_SERVED:
            assert status == 400
            assert events[0]["error"].partition(", ")[2].startswith(NOT_SERVED[row["key"]]), events
        else:
            assert status == 200, (row["key"], events)
            assert not [event for event in events if "error" in event], row["key"]


@pytest.mark.parametrize("block", JSON, ids=lambda block: block.place)
def test_examples_in_json(block: Block, server: TritonServer, folder: Path) -> None:
    """A list is ``messages``, an object ``media_parameters``."""
    body = {"sampling_parameters": SHORT}
    if isinstance(json.loads(block.text), list):
        body |= {"messages": block.text, "image": [data_uri("image", folder)]}
    else:
        body |= {"media_parameters": block.text, "video": [data_uri("video", folder)], "text_input": "Why?"}
    status, events = generate(server, "minicpmo", body)
    assert status == 200, events
    assert "text_output" in events[-1]


@pytest.mark.parametrize("row", table(API, "### messages"), ids=lambda row: row["part"][:40])
def test_examples_of_parts(row: dict[str, str], server: TritonServer, folder: Path) -> None:
    for text in row["part"].split("`, `"):
        part = json.loads(text)
        kind = next((kind for kind in ("image", "audio", "video") if kind in part["type"]), "")
        body: dict[str, Any] = {"sampling_parameters": SHORT}
        if part["type"] == kind:
            body[kind] = [data_uri(kind, folder)]
        elif kind:
            text = text.replace("…", data_uri(kind, folder))
        content = [json.loads(text), {"type": "text", "text": "Why?"}]
        body["messages"] = json.dumps([{"role": "user", "content": content}])
        status, events = generate(server, "minicpmo", body)
        assert status == 200, (row["part"], events)
        assert "text_output" in events[-1]


@pytest.mark.parametrize("row", table(API, "### What is refused"), ids=lambda row: row["example"][:50])
def test_examples_of_refusals(row: dict[str, str], server: TritonServer, folder: Path) -> None:
    body = member(row["example"], folder)
    if not body.keys() & {"text_input", "messages", "cancel_request_id"}:
        body["text_input"] = "What is this?"
    status, events = generate(server, "llm" if "llm" in row["field"] else "minicpmo", body)
    assert status == 400, events
    message = events[0]["error"]
    beginning, dots, _ = row["message"].partition("…")
    plain = re.sub(r"^in ensemble '\w+', ", "", message)
    assert plain.startswith(beginning), message
    assert dots or plain == beginning
