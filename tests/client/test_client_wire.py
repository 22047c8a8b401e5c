"""Messages to input tensors and output tensors to chunks, without any transport."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from minicpmo_client import wire
from minicpmo_client.errors import InvalidRequest, ServerError
from minicpmo_client.wire import Chat, Chunk, build_inputs, join_chunks, parse_chunk
from minicpmo_triton import schema

PIXELS = np.zeros((2, 2, 3), np.uint8)


def messages_of(inputs: dict[str, Any]) -> Any:
    (text,) = inputs["messages"]
    return json.loads(text)


def test_names_and_types_are_the_servers() -> None:
    types = {tensor.name: tensor.dtype.replace("STRING", "BYTES") for tensor in schema.LLM.inputs}
    assert {name: types.get(name) for name in wire.INPUTS} == wire.INPUTS
    assert set(wire.OUTPUTS) == {tensor.name for tensor in schema.ANSWER}
    one_element = {tensor.name for tensor in schema.LLM.inputs if tensor.dims == (1,)}
    assert one_element >= set(wire.INPUTS) - set(wire.MEDIA)


@pytest.mark.parametrize("model", [schema.MINICPMO, schema.MINICPMO_UNARY, schema.ENCODE, schema.LLM])
def test_a_model_takes_what_is_sent_to_it(model: schema.Model) -> None:
    inputs = build_inputs(
        "x", images=[b"i"], audio=[b"a"], videos=[b"v"], sampling={}, media_parameters={}, stream=True
    )
    sent = set(wire.chat_request(model.name, "", inputs).inputs)
    sent -= {"stream", "sampling_parameters"} if model is schema.ENCODE else set()
    assert sent <= {tensor.name for tensor in model.inputs}
    assert {schema.MINICPMO.name: schema.MINICPMO_UNARY.name} == wire.UNARY_MODELS
    assert (schema.LLM.name, schema.ENCODE.name) == (wire.ENGINE_MODEL, wire.ENCODE_MODEL)


def test_only_the_engine_is_asked_for_what_the_others_send_anyway() -> None:
    assert wire.chat_request("llm", "r", {"stream": True}).inputs == {
        "stream": True,
        **{tensor.name: True for tensor in schema.RETURN_FLAGS},
    }
    assert wire.chat_request("minicpmo", "r", {"stream": True}).inputs == {"stream": True}


def test_a_stream_of_the_engine_itself_needs_no_notice() -> None:
    assert wire.cancel_request(wire.Request("llm", "r", {"stream": True})) is None


@pytest.mark.parametrize(
    ("model", "stream"), [("minicpmo", True), ("minicpmo", False), ("minicpmo_unary", False), ("llm", False)]
)
def test_whatever_else_is_given_up_is_told_to_the_engine(model: str, stream: bool) -> None:
    notice = wire.cancel_request(wire.Request(model, "r", {"stream": stream}))
    assert notice is not None
    assert (notice.model, notice.inputs) == ("llm", {"cancel_request_id": [b"r"]})
    assert notice.request_id != "r"


def test_urls_are_fetched_only_when_asked_to() -> None:
    fetched: list[tuple[str, str]] = []

    def fetch(url: str, field: str) -> bytes:
        fetched.append((url, field))
        return url[-1:].encode()

    content = [
        {"type": "image_url", "image_url": {"url": "http://h/1", "detail": "high"}},
        {"type": "video", "video": "https://h/2"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "audio", "audio": "http://h/3"},
    ]
    inputs = build_inputs([{"role": "user", "content": content}], fetch=fetch)
    assert (inputs["image"], inputs["video"], inputs["audio"]) == ([b"1"], [b"2"], [b"3"])
    assert [url for url, _ in fetched] == ["http://h/1", "https://h/2", "http://h/3"]
    assert fetched[0][1] == "messages[0].content[0].image_url"
    assert messages_of(inputs)[0]["content"] == [
        {"type": "image"},
        {"type": "video"},
        content[2],
        {"type": "audio"},
    ]
    for index in (0, 1, 3):
        with pytest.raises(InvalidRequest, match=r"content\[0\]\.\w+: is a URL; .* fetch_urls=True"):
            build_inputs([{"role": "user", "content": [content[index]]}])


def test_a_plain_question_is_one_user_turn() -> None:
    inputs = build_inputs("Wie heißt du?")
    assert messages_of(inputs) == [{"role": "user", "content": "Wie heißt du?"}]
    assert set(inputs) == {"messages", "stream"}
    assert inputs["stream"] is True
    assert build_inputs("x", stream=False)["stream"] is False


def test_media_of_a_plain_question_come_before_its_text() -> None:
    inputs = build_inputs("What?", images=[b"i1", b"i2"], audio=[b"a1"], videos=[b"v1"])
    kinds = [part["type"] for part in messages_of(inputs)[0]["content"]]
    assert kinds == ["image", "image", "audio", "video", "text"]
    assert inputs["video"] == [b"v1"]
    assert (inputs["image"], inputs["audio"]) == ([b"i1", b"i2"], [b"a1"])


def test_media_move_into_the_tensors_in_order_and_leave_placeholders() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": b"first"},
                {"type": "text", "text": "and"},
                {"type": "audio", "audio": b"sound"},
                {"type": "image", "image": PIXELS, "detail": "high"},
            ],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "image", "image": b"last"}, {"type": "text", "text": "This?"}]},
    ]
    inputs = build_inputs(messages)
    images = inputs["image"]
    assert isinstance(images, list)
    assert (images[0], images[1][:4], images[2]) == (b"first", b"\x89PNG", b"last")
    assert inputs["audio"] == [b"sound"]
    turns = messages_of(inputs)
    assert turns[0] == messages[0]
    assert turns[1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "audio"},
        {"type": "image", "detail": "high"},
    ]
    assert messages[1]["content"][0] == {"type": "image", "image": b"first"}, "the caller's messages changed"


def test_other_parts_pass_untouched() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "<image>"},
    ]
    inputs = build_inputs([{"role": "user", "content": content}])
    assert messages_of(inputs)[0]["content"] == content
    assert "image" not in inputs
    assert "audio" not in inputs


def test_parameters_are_json_objects() -> None:
    inputs = build_inputs("x", sampling={"max_tokens": 3}, media_parameters={"max_slice_nums": 2})
    assert inputs["sampling_parameters"] == [b'{"max_tokens": 3}']
    assert inputs["media_parameters"] == [b'{"max_slice_nums": 2}']


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        (3, {}, "messages: expected text or a list of messages, got int"),
        (b"x", {}, "messages: expected text or a list of messages, got bytes"),
        ({"role": "user"}, {}, "messages: expected text or a list of messages, got dict"),
        (["x"], {}, r"messages\[0\]: expected an object, got str"),
        ([{"content": ["x"]}], {}, r"messages\[0\].content\[0\]: expected an object with a type, got str"),
        ([{"content": [{"type": "image"}]}], {}, r"messages\[0\].content\[0\].image: is missing"),
        (
            [{}, {"content": [{}, {"type": "audio", "audio": "gone.wav"}]}],
            {},
            r"messages\[1\].content\[1\].audio: cannot read 'gone.wav'",
        ),
        ([{"content": b"x"}], {}, "messages: cannot be written as JSON"),
        ("\ud800", {}, "messages: cannot be written as JSON"),
        ("x", {"images": "a.png"}, "images: expected a list, got str"),
        ("x", {"audio": b"RIFF"}, "audio: expected a list, got bytes"),
        ("x", {"images": PIXELS}, "images: expected a list, got ndarray"),
        ([{"content": "x"}], {"images": [b"i"]}, "images, audio and videos go with a plain question"),
        ("x", {"sampling": [1]}, "sampling: expected a mapping, got list"),
        ("x", {"sampling": {"temperature": math.nan}}, "sampling: cannot be written as JSON"),
        ("x", {"sampling": {"n": 2}}, "sampling.n: a chat has one answer, got 2"),
        ("x", {"media_parameters": {"a": object()}}, "media_parameters: cannot be written as JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(messages: Any, options: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        build_inputs(messages, **options)


def test_a_full_response_becomes_a_chunk() -> None:
    outputs = {
        "text_output": ["größer".encode()],
        "finish_reason": [b"length"],
        "cumulative_logprob": [-1.5],
        "logprobs": [b'[{"5": {"logprob": -1.5}}]'],
        "num_input_tokens": [9],
        "num_output_tokens": [1],
        "reasoning_output": [b"hm"],
    }
    assert parse_chunk(outputs) == Chunk("größer", "length", 9, 1, -1.5, [{"5": {"logprob": -1.5}}], "hm")


@pytest.mark.parametrize("reason", [b"", b"None", b"null"])
def test_what_is_not_there_is_none(reason: bytes) -> None:
    outputs = {"finish_reason": [reason], "cumulative_logprob": [math.nan], "logprobs": [b"null"]}
    assert parse_chunk(outputs) == Chunk("")
    assert parse_chunk({"text_output": ["from JSON"]}).text == "from JSON"


def test_logprobs_that_are_not_json_are_the_servers_fault() -> None:
    with pytest.raises(ServerError, match="logprobs that are not JSON"):
        parse_chunk({"logprobs": [b"{"]})


def test_chunks_join_to_the_answer() -> None:
    chunks = [
        Chunk("", None, 4, 1, reasoning="I "),
        Chunk("a", None, 4, 1, -1.0, [1], "think"),
        Chunk("b", None, 4, 2, -2.0, [2, 3]),
        Chunk("", "stop", 4),
    ]
    assert join_chunks(chunks) == Chat("ab", "stop", 4, 4, None, [1, 2, 3], "I think")
    assert join_chunks([]) == Chat("")
