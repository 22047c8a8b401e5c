"""The client library and its command against a real server: every way in, and every way out."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minicpmo_client import (
    AsyncClient,
    Chat,
    Chunk,
    Client,
    Embeddings,
    InvalidRequest,
    ModelNotFound,
)
from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.media.audio import decode_audio
from tests.scrape import scrape, total
from tests.unit.video_files import seconds_video

from .raw import stream_whole

NUM_TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
QUESTION = "What is to be seen and heard?"
TAGS = ("<think>", "</think>")
LIMIT_S = 120.0
ABORT_LIMIT_S = 20.0

protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])
apis = pytest.mark.parametrize("api", ["sync", "async"])


@pytest.fixture
def url(protocol: str, server: TritonServer) -> str:
    return server.grpc_url if protocol == "grpc" else f"http://{server.http_url}"


@pytest.fixture(scope="module")
def media(media_dir: Path) -> dict[str, list[Any]]:
    """A picture, a recording and a video, as ``chat`` takes them."""
    return {
        "images": [media_dir / "coins.png"],
        "audio": [media_dir / "front_center_16k.wav"],
        "videos": [seconds_video(2, with_sound=True)],
    }


@pytest.fixture(scope="module")
def expected(server: TritonServer, media: dict[str, list[Any]]) -> str:
    """What tritonclient alone gets for the same question."""
    values = {
        "text_input": QUESTION,
        "image": [media["images"][0].read_bytes()],
        "audio": [media["audio"][0].read_bytes()],
        "video": media["videos"],
        "sampling_parameters": json.dumps(GREEDY),
    }
    answer = stream_whole(server.grpc_url, "minicpmo", values)
    assert answer.errors == []
    return answer.text


@asynccontextmanager
async def opened(url: str, model: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, model=model, timeout_s=LIMIT_S) as client:
        yield client


def whole(api: str, url: str, model: str, messages: Any, **options: Any) -> Chat:
    """The answer, asked for in one piece."""
    if api == "sync":
        with Client(url, model=model, timeout_s=LIMIT_S) as client:
            return client.chat(messages, stream=False, **options)

    async def ask() -> Chat:
        async with opened(url, model) as client:
            return await client.chat(messages, stream=False, **options)

    return asyncio.run(ask())


def streamed(
    api: str, url: str, model: str, messages: Any, num_chunks: int | None = None, **options: Any
) -> list[Chunk]:
    """The answer's chunks; with ``num_chunks``, the loop is left after so many."""
    chunks: list[Chunk] = []
    if api == "sync":
        with Client(url, model=model, timeout_s=LIMIT_S) as client:
            for chunk in client.chat(messages, **options):
                chunks.append(chunk)
                if len(chunks) == num_chunks:
                    break
        return chunks

    async def ask() -> None:
        async with opened(url, model) as client:
            async for chunk in client.chat(messages, **options):
                chunks.append(chunk)
                if len(chunks) == num_chunks:
                    break

    asyncio.run(ask())
    return chunks


@protocols
@apis
@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_streamed_and_whole_answers_are_the_same(
    api: str, url: str, model: str, media: dict[str, list[Any]], expected: str
) -> None:
    answer = whole(api, url, model, QUESTION, sampling=GREEDY, **media)
    assert answer == Chat(expected, "length", answer.num_input_tokens, NUM_TOKENS, answer.cumulative_logprob)
    assert answer.num_input_tokens > 4 * 64  # a picture, two frames, the recording and the question
    chunks = streamed(api, url, model, QUESTION, sampling=GREEDY, **media)
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == expected
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert sum(chunk.num_output_tokens for chunk in chunks) == NUM_TOKENS
    assert chunks[-1].num_input_tokens == answer.num_input_tokens


@protocols
@apis
def test_the_unary_model_answers_whole(
    api: str, url: str, media: dict[str, list[Any]], expected: str
) -> None:
    answer = whole(api, url, "minicpmo_unary", QUESTION, sampling=GREEDY, **media)
    assert (answer.text, answer.finish_reason, answer.num_output_tokens) == (expected, "length", NUM_TOKENS)
    [chunk] = streamed(api, url, "minicpmo_unary", QUESTION, sampling=GREEDY, **media)
    assert chunk.text == expected


@protocols
def test_arrays_and_messages_answer_as_files_do(url: str, media: dict[str, list[Any]], expected: str) -> None:
    pixels = np.asarray(Image.open(media["images"][0]))
    samples = decode_audio("audio", media["audio"][0].read_bytes(), 60)
    content = [
        {"type": "image", "image": pixels},
        {"type": "audio", "audio": (samples, 16000)},
        {"type": "video", "video": media["videos"][0]},
        {"type": "text", "text": QUESTION},
    ]
    answer = whole("sync", url, "minicpmo", [{"role": "user", "content": content}], sampling=GREEDY)
    assert answer.text == expected


@protocols
@pytest.mark.parametrize("model", ["minicpmo", "llm", "minicpmo_unary"])
def test_thinking_comes_apart_from_the_answer(url: str, model: str, tiny_checkpoint: Path) -> None:
    vocabulary = json.loads((tiny_checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    sampling = {
        "temperature": 0,
        "max_tokens": 60,
        "structured_outputs": {"grammar": 'root ::= "<think>hm, yes</think>the answer"'},
        "logit_bias": {str(vocabulary[token]): 100 for token in TAGS},  # as tokens, not spelled
    }
    options: dict[str, Any] = {"sampling": sampling, "media_parameters": {"enable_thinking": True}}
    for api in ("sync", "async"):
        answer = whole(api, url, model, "Why?", **options)
        assert (answer.reasoning, answer.text) == ("hm, yes", "the answer")
    chunks = streamed("sync", url, model, "Why?", **options)
    assert "".join(chunk.reasoning for chunk in chunks) == "hm, yes"
    assert "".join(chunk.text for chunk in chunks) == "the answer"


def embedded(api: str, url: str, **items: Any) -> Embeddings:
    if api == "sync":
        with Client(url, timeout_s=LIMIT_S) as client:
            return client.embed(**items)

    async def ask() -> Embeddings:
        async with opened(url, "minicpmo") as client:
            return await client.embed(**items)

    return asyncio.run(ask())


@protocols
@apis
def test_embeddings_are_the_goldens(
    api: str, url: str, media_dir: Path, golden_arrays: Callable[[str], Any]
) -> None:
    """Each item's rows, in the order given."""
    images = ["coins.png", "astronaut.png", "small_200x300.png"]
    found = embedded(
        api, url, images=[media_dir / name for name in images], audio=[media_dir / "front_center_16k.wav"]
    )
    cases = ["image_gray", "image_sliced", "image_small_upscaled"]
    wanted = [golden_arrays(case)["vision_embeds"].reshape(-1, 128) for case in cases]
    wanted.append(golden_arrays("audio")["audio_embeds_0"])
    for rows, golden in zip([*found.images, *found.audio], wanted, strict=True):
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, golden, rtol=0, atol=1e-3)


@protocols
@apis
@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
def test_wrong_media_are_refused_by_name(
    api: str, is_streamed: bool, url: str, media: dict[str, list[Any]]
) -> None:
    ask = streamed if is_streamed else whole
    for kind, field in (("images", "image"), ("audio", "audio"), ("videos", "video")):
        for model in ("minicpmo", "llm"):
            with pytest.raises(InvalidRequest, match=rf"^{field}\[1\]: ") as refused:
                ask(api, url, model, "x", **{kind: [media[kind][0], b"neither this nor that"]})
            assert "Traceback" not in str(refused.value)
    with pytest.raises(InvalidRequest, match=r"^sampling_parameters\.temprature: "):
        ask(api, url, "minicpmo", "x", sampling={"temprature": 1})
    with pytest.raises(ModelNotFound):
        ask(api, url, "no_such_model", "x")


@protocols
@apis
def test_embed_refuses_by_name(api: str, url: str, media_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^images\[1\]: "):
        embedded(api, url, images=[media_dir / "coins.png", b"no image"])


def num_running(server: TritonServer) -> int:
    return int(total(scrape(server.metrics_url), "minicpmo_llm_requests_in_flight"))


def expect_one_running(server: TritonServer) -> None:
    """The gauge follows within a poll of the server's, 0.05 s."""
    deadline = time.monotonic() + 2.0
    while num_running(server) != 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert num_running(server) == 1


def num_generated(server: TritonServer) -> float:
    """Tokens since the server's start."""
    with Client(server.grpc_url, metrics_url=server.metrics_url) as client:
        return client.stats(LIMIT_S).total("vllm:generation_tokens_total")


def expect_abort(server: TritonServer) -> None:
    """Nothing is generated any more: within a second, or on a busy machine well before the answer's end.

    A second is some 200 tokens here, and the whole answer has 3000.
    """
    before, started_s = num_generated(server), time.monotonic()
    while num_running(server):
        assert time.monotonic() - started_s < ABORT_LIMIT_S, "the generation runs on"
        time.sleep(0.01)
    if time.monotonic() - started_s >= 1.0:
        assert 0 < before <= num_generated(server) < before + LONG["max_tokens"] / 4


@protocols
@pytest.mark.parametrize("model", ["minicpmo", "llm"])
def test_leaving_the_loop_aborts_the_generation(url: str, model: str, server: TritonServer) -> None:
    with Client(url, model=model, timeout_s=LIMIT_S) as client:  # open all the while: it is the loop's end
        for index, _ in enumerate(client.chat("Tell me all", sampling=LONG)):
            if index == 3:
                expect_one_running(server)
                break
        expect_abort(server)
        assert client.chat("Hi", sampling=GREEDY, stream=False).num_output_tokens == NUM_TOKENS


@protocols
def test_many_chats_at_once_share_a_client(url: str, media: dict[str, list[Any]], expected: str) -> None:
    async def run() -> list[Chat | BaseException]:
        async with opened(url, "minicpmo") as client:
            right = [client.chat(QUESTION, sampling=GREEDY, stream=False, **media) for _ in range(4)]
            wrong = client.chat("x", images=[b"no image"], stream=False)
            return await asyncio.gather(*right, wrong, return_exceptions=True)

    *right, wrong = asyncio.run(run())
    assert [answer.text for answer in right if isinstance(answer, Chat)] == [expected] * 4
    assert isinstance(wrong, InvalidRequest)


def test_stats_count(server: TritonServer, media_dir: Path) -> None:
    with Client(server.grpc_url, metrics_url=server.metrics_url, timeout_s=LIMIT_S) as client:
        before = client.stats()
        # 512x512: the whole picture and two slices of equal size, so one call of one and one of two.
        client.chat("What?", images=[media_dir / "astronaut.png"], sampling=GREEDY, stream=False)
        after = client.stats()
    assert [encoder.model for encoder in after.encoders] == ["audio_encoder", "vision_encoder"]
    for old, new in zip(before.encoders, after.encoders, strict=True):
        is_vision = new.model == "vision_encoder"
        assert new.num_misses - old.num_misses == (2 if is_vision else 0)
        assert new.num_items - old.num_items == (3 if is_vision else 0)
        assert (new.graph_hits, new.num_graphs, new.capture_failures) == (0, 0, 0)  # no graph on a CPU
    requests = "nv_inference_request_success"
    assert after.total(requests, model="minicpmo") - before.total(requests, model="minicpmo") == 1

    async def count() -> float:
        async with AsyncClient(server.grpc_url, metrics_url=server.metrics_url) as client:
            return (await client.stats()).total(requests, model="minicpmo")

    assert asyncio.run(count()) == after.total(requests, model="minicpmo")


@protocols
def test_readiness(url: str) -> None:
    with Client(url) as client, Client(url, model="no_such_model") as other:
        client.wait_until_ready(5.0)
        assert client.is_ready()
        assert not other.is_ready()


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "minicpmo_client.cli", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*argv: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of ``minicpmo``."""
    process = start(*argv)
    output, error = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, error


@protocols
def test_command_chat(url: str, media: dict[str, list[Any]], expected: str, tmp_path: Path) -> None:
    video = tmp_path / "street.mp4"
    video.write_bytes(media["videos"][0])
    files = ["--image", str(media["images"][0]), "--audio", str(media["audio"][0]), "--video", str(video)]
    sampling = ["--temperature", "0", "--max-tokens", str(NUM_TOKENS)]
    status, output, error = run("chat", "--url", url, *files, *sampling, "--timings", QUESTION)
    assert (status, output) == (0, expected + "\n")
    assert f"{NUM_TOKENS} output tokens" in error
    wrong = run("chat", "--url", url, "--image", str(media["audio"][0]), "x")
    assert wrong[:2] == (1, "")
    assert wrong[2].startswith("minicpmo: error: image[0]: ")
    assert wrong[2].count("\n") == 1


def test_command_ready_embed_and_stats(server: TritonServer, media_dir: Path, tmp_path: Path) -> None:
    url = server.grpc_url
    assert run("ready", "--url", url) == (0, f"model minicpmo at {url} is ready\n", "")
    status, _, error = run("ready", "--url", url, "--model", "no_such_model")
    assert (status, error) == (1, f"minicpmo: error: model no_such_model at {url} is not ready\n")
    image, file = media_dir / "coins.png", tmp_path / "out.npz"
    status, output, error = run("embed", "--url", url, "--image", str(image), "-o", str(file))
    assert (status, error) == (0, "")
    with np.load(file) as saved:
        [rows] = saved.values()
    assert output == f"image_0  {rows.shape[0]} x 128  {image}\n"
    status, output, error = run("stats", "--url", url, "--metrics-url", server.metrics_url, "--json")
    assert (status, error) == (0, "")
    items = {encoder["model"]: encoder["num_items"] for encoder in json.loads(output)["encoders"]}
    assert items["vision_encoder"] >= len(rows) // 64
    status, output, _ = run("stats", "--url", url, "--metrics-url", server.metrics_url)
    assert status == 0
    assert "vision_encoder" in output
