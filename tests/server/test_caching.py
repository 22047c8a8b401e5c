"""Two caches: vLLM's of prompt prefixes, and Triton's of an encoder's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from minicpmo_triton.launcher import TritonServer, find_triton_home
from tests.scrape import scrape, settled, total

from .conftest import REPOSITORY, server_options
from .counted import Counted, counted
from .raw import Value, grpc_inputs, stream_whole

ENCODED = ("input_ids", "image_positions", "audio_positions", "image_embeds", "audio_embeds")
#: Tokens of a block of vLLM's cache on the CPU; the cache holds whole blocks of a prompt.
BLOCK_TOKENS = 128
SAMPLING = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}


@dataclass(frozen=True)
class Asked:
    """One answer and what it found in the prefix cache."""

    text: str
    cumulative_logprob: float
    num_input_tokens: int
    num_hits: float  # tokens
    num_cached: float  # tokens, by the other counter


def prompt(picture: bytes, name: str) -> dict[str, Value]:
    """More than two blocks of text, a picture, and more than two blocks of text again."""
    content = [
        {"type": "text", "text": f"({name}) " + "Look closely at the picture that follows. " * 7},
        {"type": "image"},
        {"type": "text", "text": "Then say what you see, at length and in order. " * 7},
    ]
    return {"messages": json.dumps([{"role": "user", "content": content}]), "image": [picture]}


def ask(server: TritonServer, values: dict[str, Value], **sampling: bool) -> Asked:
    change: Counted
    with counted(server, 1) as change:
        answer = stream_whole(
            server.grpc_url,
            "minicpmo",
            {**values, "sampling_parameters": json.dumps({**SAMPLING, **sampling})},
        )
    assert answer.errors == []
    [response] = answer.responses
    return Asked(
        text=answer.text,
        cumulative_logprob=float(response["cumulative_logprob"][0]),
        num_input_tokens=int(response["num_input_tokens"][0]),
        num_hits=change.change("vllm:prefix_cache_hits_total"),
        num_cached=change.change("vllm:prompt_tokens_cached_total"),
    )


def encode(url: str, values: dict[str, Value]) -> dict[str, np.ndarray]:
    with triton_grpc.InferenceServerClient(url) as client:
        result = client.infer("encode", grpc_inputs(values))
        return {name: result.as_numpy(name) for name in ENCODED}


def test_a_repeated_picture_and_text_come_from_the_prefix_cache(
    server: TritonServer, media_dir: Path
) -> None:
    values = prompt((media_dir / "coins.png").read_bytes(), "repeated")
    image_positions = encode(server.grpc_url, values)["image_positions"]
    first = ask(server, values)
    again = ask(server, values)
    # Some position is always computed, or there would be nothing to sample from.
    blocks = (first.num_input_tokens - 1) // BLOCK_TOKENS
    assert first.num_hits == 0
    assert again.num_hits == again.num_cached == blocks * BLOCK_TOKENS
    assert again.num_hits > image_positions.max()  # the picture was among them
    assert again.text == first.text
    assert again.cumulative_logprob == pytest.approx(first.cumulative_logprob, abs=1e-3)


def test_another_picture_under_the_same_text_is_never_taken_for_it(
    server: TritonServer, media_dir: Path
) -> None:
    # Two pictures of one size: the token ids of the prompts are equal to the last.
    pixels = (media_dir / "coins.png").read_bytes(), mirrored(media_dir / "coins.png")
    one, other = (prompt(picture, "other picture") for picture in pixels)
    encoded = [encode(server.grpc_url, values) for values in (one, other)]
    assert np.array_equal(encoded[0]["input_ids"], encoded[1]["input_ids"])
    num_text_tokens = int(encoded[0]["image_positions"].min())
    assert num_text_tokens > BLOCK_TOKENS
    first = ask(server, one)
    second = ask(server, other)
    assert 0 < second.num_hits <= num_text_tokens
    alone = ask(server, other, skip_reading_prefix_cache=True)
    assert alone.num_cached == 0
    assert second.text == alone.text
    assert second.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    assert abs(second.cumulative_logprob - first.cumulative_logprob) > 0.01  # the picture matters


def mirrored(path: Path) -> bytes:
    import io

    from PIL import Image, ImageOps

    file = io.BytesIO()
    ImageOps.mirror(Image.open(path)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def caching_encoders(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """``encode`` and what it needs, with Triton's local response cache on both encoders."""
    repository = tmp_path_factory.mktemp("caching")
    for model in ("preprocess", "encode", "vision_encoder", "audio_encoder"):
        shutil.copytree(REPOSITORY / model, repository / model)
        if model.endswith("_encoder"):
            with (repository / model / "config.pbtxt").open("a") as config:
                config.write("response_cache { enable: true }\n")
    options = replace(
        server_options(tiny_checkpoint),
        model_repository=repository,
        extra_arguments=(
            f"--cache-directory={find_triton_home() / 'caches'}",
            "--cache-config=local,size=67108864",
        ),
    )
    with TritonServer(options) as running:
        yield running


def num_encoded(server: TritonServer) -> dict[str, float]:
    samples = settled(server.metrics_url, "minicpmo_encoder")
    return {
        model: total(samples, "minicpmo_encoder_items_total", model=model)
        for model in ("vision_encoder", "audio_encoder")
    }


def test_a_repeated_picture_and_clip_skip_their_encoders(
    caching_encoders: TritonServer, media_dir: Path
) -> None:
    url = caching_encoders.grpc_url
    picture = (media_dir / "astronaut.png").read_bytes()
    clip = (media_dir / "front_center_16k.wav").read_bytes()
    first = encode(url, {"text_input": "What is it?", "image": [picture], "audio": [clip]})
    before = num_encoded(caching_encoders)
    assert before == {"vision_encoder": 3, "audio_encoder": 1}
    again = encode(url, {"text_input": "What is it?", "image": [picture], "audio": [clip]})
    other_text = encode(url, {"text_input": "And who?", "image": [picture], "audio": [clip]})
    assert num_encoded(caching_encoders) == before
    for repeated in (again, other_text):
        for name in ("image_embeds", "audio_embeds"):
            assert np.array_equal(repeated[name], first[name])
    assert total(scrape(caching_encoders.metrics_url), "nv_cache_num_hits_per_model") == 4


def test_another_picture_is_encoded_in_spite_of_the_cache(
    caching_encoders: TritonServer, media_dir: Path
) -> None:
    url = caching_encoders.grpc_url
    one = encode(url, {"text_input": "Hi", "image": [(media_dir / "coins.png").read_bytes()]})
    before = num_encoded(caching_encoders)
    other = encode(url, {"text_input": "Hi", "image": [mirrored(media_dir / "coins.png")]})
    after = num_encoded(caching_encoders)
    assert after["vision_encoder"] > before["vision_encoder"]
    assert not np.array_equal(one["image_embeds"], other["image_embeds"])


def test_text_alone_is_not_spoiled_by_the_cache(caching_encoders: TritonServer) -> None:
    for _ in range(2):
        encoded = encode(caching_encoders.grpc_url, {"text_input": "Hello!"})
        assert encoded["image_embeds"].shape == encoded["audio_embeds"].shape == (0, 128)


def test_an_error_is_kept_as_an_answer_without_rows(caching_encoders: TritonServer) -> None:
    """A fault of Triton 2.51 that docs/caching.md warns of; never rows of something else."""
    wrong: dict[str, Value] = {
        "patches": np.zeros((1024, 588), np.uint8),
        "grid_sizes": np.array([[31, 32]], np.int32),
    }
    with triton_grpc.InferenceServerClient(caching_encoders.grpc_url) as client:
        with pytest.raises(triton_grpc.InferenceServerException, match="grid_sizes"):
            client.infer("vision_encoder", grpc_inputs(wrong))
        assert client.infer("vision_encoder", grpc_inputs(wrong)).as_numpy("image_embeds") is None
