"""What ``sampling_parameters`` and thinking do to an answer, through the whole pipeline."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc

from minicpmo_triton.launcher import TritonServer
from minicpmo_triton.tiny_checkpoint import VOCAB

from .conftest import MANY_TOKENS
from .raw import Answer, Value, grpc_inputs, stream_whole, streaming

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
#: Hot, so that the tiny model does not spend itself on the white space that JSON allows.
HOT = {"temperature": 2, "seed": 1, "max_tokens": 1000}
SAMPLED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 12, "ignore_eos": True}


def ask(
    server: TritonServer, *, stream: bool = False, media: dict[str, Any] | None = None, **sampling: Any
) -> Answer:
    values: dict[str, Value] = {
        "text_input": "Tell me something.",
        "stream": stream,
        "sampling_parameters": json.dumps(sampling),
    }
    if media is not None:
        values["media_parameters"] = json.dumps(media)
    return stream_whole(server.grpc_url, "minicpmo", values)


def answered(server: TritonServer, **options: Any) -> Answer:
    answer = ask(server, **options)
    assert (answer.errors, answer.num_final) == ([], 1)
    return answer


def reason(answer: Answer) -> str:
    return answer.responses[-1]["finish_reason"][0].decode()


def num_tokens(answer: Answer) -> int:
    return sum(int(response["num_output_tokens"][0]) for response in answer.responses)


def entries(answer: Answer) -> list[Any]:
    """Log-probabilities of every token of the one sequence."""
    return [entry for response in answer.responses for entry in json.loads(response["logprobs"][0])]


def test_several_sequences_come_as_elements_of_one_response(server: TritonServer) -> None:
    [response] = answered(server, **SAMPLED, n=3, seed=7).responses
    texts = response["text_output"].tolist()
    assert len(texts) == len(set(texts)) == 3
    assert response["finish_reason"].tolist() == [b"length"] * 3
    assert response["num_output_tokens"].tolist() == [12] * 3
    assert response["num_input_tokens"].shape == (1,)


def test_several_sequences_streamed_end_each(server: TritonServer) -> None:
    answer = answered(server, stream=True, **SAMPLED, n=3, seed=7)
    ended = [r for response in answer.responses for r in response["finish_reason"].tolist() if r]
    assert ended == [b"length"] * 3
    assert sum(int(r["num_output_tokens"].sum()) for r in answer.responses) == 36


def test_unary_gives_several_sequences(server: TritonServer) -> None:
    values: dict[str, Value] = {
        "text_input": "Tell me something.",
        "sampling_parameters": json.dumps({**SAMPLED, "n": 2, "seed": 3, "logprobs": 1}),
    }
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer("minicpmo_unary", grpc_inputs(values))
    assert len(result.as_numpy("text_output")) == 2
    assert result.as_numpy("num_output_tokens").tolist() == [12, 12]
    assert [len(json.loads(part)) for part in result.as_numpy("logprobs")] == [12, 12]
    assert result.as_numpy("cumulative_logprob").shape == (2,)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_stop_string_ends_the_answer_before_it(stream: bool, server: TritonServer) -> None:
    whole = answered(server, **GREEDY).text
    stop = whole[len(whole) // 2 :][:3]
    cut = answered(server, stream=stream, **GREEDY, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert reason(cut) == "stop"
    kept = answered(server, stream=stream, **GREEDY, stop=stop, include_stop_str_in_output=True)
    assert kept.text == cut.text + stop


def test_min_tokens_puts_the_end_off(server: TritonServer) -> None:
    every_token_stops = {"stop_token_ids": list(range(VOCAB - 1))}
    early = answered(server, **GREEDY, **every_token_stops)
    assert (num_tokens(early), reason(early)) == (1, "stop")
    late = answered(server, **GREEDY, **every_token_stops, min_tokens=5)
    assert num_tokens(late) >= 5


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_seed_gives_one_answer(stream: bool, server: TritonServer) -> None:
    texts = [answered(server, stream=stream, **SAMPLED, seed=seed).text for seed in (11, 11, 12)]
    assert texts[0] == texts[1] != texts[2]


def test_logit_bias_forces_a_token(server: TritonServer) -> None:
    token = 65
    answer = answered(server, **GREEDY, logit_bias={str(token): 100}, logprobs=0)
    assert [list(entry) for entry in entries(answer)] == [[str(token)]] * 12


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_breaks_a_repetition(name: str, server: TritonServer) -> None:
    # Among few tokens the tiny model repeats itself; a penalty brings others.
    few = {"allowed_token_ids": list(range(60, 90)), "logprobs": 0}
    plain, changed = (answered(server, **GREEDY, **few, **penalty) for penalty in ({}, {name: 2.0}))
    num_plain, num_changed = (len({next(iter(e)) for e in entries(a)}) for a in (plain, changed))
    assert num_plain < num_changed


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_one_entry_a_token(count: int, stream: bool, server: TritonServer) -> None:
    answer = answered(server, stream=stream, **GREEDY, logprobs=count)
    logprobs = entries(answer)
    assert len(logprobs) == num_tokens(answer) == 12
    assert all(max(count, 1) <= len(entry) <= count + 1 for entry in logprobs)
    best = sum(max(token["logprob"] for token in entry.values()) for entry in logprobs)
    assert float(answer.responses[-1]["cumulative_logprob"][0]) == pytest.approx(best, abs=1e-3)


def is_json_of_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"ok"} and isinstance(value["ok"], bool)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("constraint", "accepts"),
    [
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}},
                    "required": ["ok"],
                    "additionalProperties": False,
                },
                "disable_any_whitespace": True,
            },
            is_json_of_schema,
        ),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text)),
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ],
    ids=["json", "regex", "choice"],
)
def test_structured_outputs(
    constraint: dict[str, Any], accepts: Any, stream: bool, server: TritonServer
) -> None:
    answer = answered(server, stream=stream, **HOT, structured_outputs=constraint)
    assert accepts(answer.text), answer.text
    assert reason(answer) == "stop"


@pytest.mark.parametrize("model", ["minicpmo", "llm"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_thinking_comes_apart_from_the_answer(stream: bool, model: str, server: TritonServer) -> None:
    sampling = {
        "temperature": 0,
        "max_tokens": 60,
        "structured_outputs": {"grammar": 'root ::= "<think>hm, yes</think>the answer"'},
        "logit_bias": dict.fromkeys(think_tokens(server), 100),  # the tags as tokens, not spelled
    }
    values: dict[str, Value] = {
        "text_input": "Why?",
        "stream": stream,
        "sampling_parameters": json.dumps(sampling),
        "media_parameters": json.dumps({"enable_thinking": True}),
    }
    if model == "llm":
        plain = stream_whole(server.grpc_url, model, values)
        assert plain.text == "<think>hm, yes</think>the answer"  # whoever does not ask gets it all
        values["return_reasoning_output"] = True
    answer = stream_whole(server.grpc_url, model, values)
    assert answer.errors == []
    assert b"".join(r["reasoning_output"][0] for r in answer.responses) == b"hm, yes"
    assert answer.text == "the answer"


def think_tokens(server: TritonServer) -> list[str]:
    """Ids of the tags: the prompt of a request without thinking closes it at once."""
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        prompts = [
            client.infer(
                "encode",
                grpc_inputs({"text_input": "Why?", "media_parameters": json.dumps({"enable_thinking": on})}),
            ).as_numpy("input_ids")
            for on in (True, False)
        ]
    added = prompts[1][len(prompts[0]) :].tolist()  # <think> \n\n </think> \n\n
    tags = [str(token) for token in dict.fromkeys(added) if added.count(token) == 1]
    assert len(tags) == 2
    return tags


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"n": 0},
        {"temperature": -0.1},
        {"top_p": 1.5},
        {"top_k": -5},
        {"min_p": 2},
        {"min_tokens": -1},
        {"min_tokens": 13},
        {"logprobs": -3},
        {"seed": "x"},
        {"stop": [1]},
        {"logit_bias": {"999999": 1}},
        {"logit_bias": [1]},
        {"allowed_token_ids": [-1]},
        {"structured_outputs": {"regex": "(", "choice": ["a"]}},
        {"structured_outputs": {"regex": "("}},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"prompt_logprobs": 1},
        {"output_kind": 1},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused_with_its_name(wrong: dict[str, Any], server: TritonServer) -> None:
    [name] = wrong
    answer = ask(server, **{**GREEDY, **wrong})
    assert len(answer.errors) == answer.num_final == 1
    assert answer.responses == []
    assert f"sampling_parameters.{name}: " in answer.errors[0]
    assert "Traceback" not in answer.errors[0]


@pytest.mark.parametrize("text", ["[1]", "{", '{"temperature": NaN}', "7"])
def test_what_is_no_json_object_is_refused(text: str, server: TritonServer) -> None:
    values: dict[str, Value] = {"text_input": "Hi", "sampling_parameters": text}
    [message] = stream_whole(server.grpc_url, "minicpmo", values).errors
    assert "sampling_parameters: " in message


def test_quoted_numbers_are_numbers(server: TritonServer) -> None:
    """As in Triton's own vLLM backend, whose clients send them so."""
    quoted = {"temperature": "0", "max_tokens": "12", "top_p": "0.9", "logprobs": "1", "ignore_eos": True}
    answer = answered(server, **quoted)
    assert answer.text == answered(server, **GREEDY).text
    assert len(entries(answer)) == num_tokens(answer) == 12


def test_a_request_cancelled_in_mid_stream_ends_with_that_and_nothing_after_it(server: TritonServer) -> None:
    values: dict[str, Value] = {
        "text_input": "Tell me all",
        "stream": True,
        "sampling_parameters": json.dumps({**GREEDY, "max_tokens": MANY_TOKENS}),
    }
    for model in ("minicpmo", "llm"):
        with streaming(server.grpc_url, model, values, request_id=f"cancelled {model}") as (answer, _):
            answer.arrived.get(timeout=60)
            stream_whole(server.grpc_url, "llm", {"cancel_request_id": f"cancelled {model}"})
            assert answer.ended.wait(60)
            num_responses = len(answer.responses)
            time.sleep(0.3)  # for what must not come
        assert (len(answer.responses), answer.num_final) == (num_responses, 1)
        [message] = answer.errors
        assert message.endswith("the request was cancelled")
