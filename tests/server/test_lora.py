"""LoRA adapters by name through a server, which also has vLLM's metrics switched off."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.llm.engine import Engine, read_lora_adapters
from tests.engine.conftest import write_adapter
from tests.engine.helpers import GREEDY, maker, submit
from tests.scrape import scrape

from .conftest import ENGINE_ARGS, REPOSITORY, server_options
from .raw import Value, stream_whole

QUESTION = "Hello! Who are you?"  # the golden case "text"
WITH_LORA = {**ENGINE_ARGS, "max_model_len": 1024, "enable_lora": True}
REFUSAL = "sampling_parameters.lora_name: LoRA nobody is not supported, we currently support ['poet', 'cook']"
METRICS = 'parameters { key: "REPORT_CUSTOM_METRICS" value: { string_value: "%s" } }'


def sampling(name: str | None) -> str:
    return json.dumps({**json.loads(GREEDY), **({} if name is None else {"lora_name": name})})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with two adapters beside the engine's arguments, as docs/lora.md has it."""
    repository = tmp_path_factory.mktemp("lora") / "model_repository"
    shutil.copytree(REPOSITORY, repository, ignore=shutil.ignore_patterns("__pycache__"))
    folder = repository / "llm" / "1"
    write_adapter(folder / "adapters" / "poet")
    cook = write_adapter(folder.parents[2] / "cook", scale=-1.0)
    (folder / "multi_lora.json").write_text(json.dumps({"poet": "adapters/poet", "cook": str(cook)}))
    config = folder.parent / "config.pbtxt"
    assert METRICS % "true" in config.read_text()
    config.write_text(config.read_text().replace(METRICS % "true", METRICS % "false"))
    return repository


@pytest.fixture(scope="module")
def engines(
    repository: Path, tiny_checkpoint: Path, goldens: Mapping[str, Any], golden_arrays: Callable[[str], Any]
) -> dict[str | None, str]:
    """Adapter's name, or None -> what the engine alone answers."""
    adapters = read_lora_adapters(repository / "llm" / "1", WITH_LORA, {})
    engine = Engine.start(tiny_checkpoint, WITH_LORA, "float32", {}, lora_adapters=adapters)
    try:
        make = maker(engine, goldens, golden_arrays)
        answers = {name: submit(engine, make("text", sampling=sampling(name))) for name in (None, *adapters)}
        assert [answer.wait() for answer in answers.values()] == [None] * 3
        return {name: answer.text() for name, answer in answers.items()}
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def lora_server(
    engines: dict[str | None, str], repository: Path, tiny_checkpoint: Path
) -> Iterator[TritonServer]:
    options = replace(
        server_options(tiny_checkpoint),
        model_repository=repository,
        environment={"MINICPMO_ENGINE_ARGS": json.dumps(WITH_LORA)},
    )
    with TritonServer(options) as server:
        yield server


@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_an_adapter_answers_as_in_the_engine(
    model: str, lora_server: TritonServer, engines: dict[str | None, str]
) -> None:
    assert len(set(engines.values())) == 3
    for name in ("poet", None, "cook", "poet"):
        values: dict[str, Value] = {"text_input": QUESTION, "sampling_parameters": sampling(name)}
        for stream in (True, False):
            answer = stream_whole(lora_server.grpc_url, model, {**values, "stream": stream})
            assert (answer.errors, answer.text) == ([], engines[name])


def test_adapters_answer_side_by_side(lora_server: TritonServer, engines: dict[str | None, str]) -> None:
    def ask(name: str | None) -> str:
        values: dict[str, Value] = {"text_input": QUESTION, "sampling_parameters": sampling(name)}
        return stream_whole(lora_server.grpc_url, "minicpmo", values).text

    names = [*engines] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(ask, names)) == [engines[name] for name in names]


def post(server: TritonServer, model: str, action: str, body: Mapping[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{model}/{action}", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_an_unknown_name_is_refused_with_those_there_are(model: str, lora_server: TritonServer) -> None:
    values: dict[str, Value] = {"text_input": QUESTION, "sampling_parameters": sampling("nobody")}
    for stream in (True, False):
        answer = stream_whole(lora_server.grpc_url, model, {**values, "stream": stream})
        [message] = answer.errors
        assert REFUSAL in message
        assert (answer.responses, answer.num_final) == ([], 1)
        status, reply = post(
            lora_server, model, "generate_stream" if stream else "generate", {**values, "stream": stream}
        )
        assert REFUSAL in reply
        assert status == 400


def test_the_answer_over_http_is_the_adapters_too(
    lora_server: TritonServer, engines: dict[str | None, str]
) -> None:
    body = {"text_input": QUESTION, "sampling_parameters": sampling("cook")}
    status, reply = post(lora_server, "minicpmo", "generate", body)
    assert (status, json.loads(reply)["text_output"]) == (200, engines["cook"])


def test_where_adapters_are_off_a_name_is_refused(server: TritonServer) -> None:
    values: dict[str, Value] = {"text_input": QUESTION, "sampling_parameters": sampling("poet")}
    [message] = stream_whole(server.grpc_url, "minicpmo", values).errors
    assert "sampling_parameters.lora_name: LoRA feature is not enabled." in message


def test_with_metrics_switched_off_none_of_vllms_is_shown(lora_server: TritonServer) -> None:
    stream_whole(
        lora_server.grpc_url, "minicpmo", {"text_input": QUESTION, "sampling_parameters": sampling(None)}
    )
    names = {sample.name for sample in scrape(lora_server.metrics_url)}
    assert not {name for name in names if name.startswith("vllm:")}
    assert "minicpmo_llm_requests_in_flight" in names  # our own stay
