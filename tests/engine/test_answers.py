"""What a client may ask of an answer, through the real engine: every parameter does what it says."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.llm.engine import Engine
from tests.engine.helpers import Answer, Make, submit

Ask = Callable[..., Answer]


@pytest.fixture
def ask(shared_engine: Engine, make_shared: Make) -> Ask:
    """Answer of a golden case to sampling parameters given as keywords."""

    def ask(name: str = "text", stream: bool = False, **sampling: Any) -> Answer:
        sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling}
        answer = submit(shared_engine, make_shared(name, stream, json.dumps(sampling)))
        assert answer.wait() is None
        return answer

    return ask


def refusal(engine: Engine, make: Make, **sampling: Any) -> InvalidArgument:
    """Why the engine, or the parser before it, refuses these sampling parameters."""
    try:
        error = submit(engine, make("text", False, json.dumps(sampling))).wait()
    except InvalidArgument as refused:
        return refused
    assert isinstance(error, InvalidArgument)
    return error


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_n_sequences_differ_and_end_each(ask: Ask, stream: bool) -> None:
    answer = ask(n=3, temperature=1.5, seed=3, stream=stream)
    texts = [answer.token_ids(index) for index in range(3)]
    assert len(set(map(tuple, texts))) == 3
    assert [len(tokens) for tokens in texts] == [12] * 3
    assert [answer.finish_reason(index) for index in range(3)] == ["length"] * 3
    assert answer.increments[-1].finished


def test_one_seed_gives_one_answer_streamed_or_not(ask: Ask) -> None:
    first = ask(temperature=1.5, seed=7).token_ids()
    assert ask(temperature=1.5, seed=7, stream=True).token_ids() == first
    assert ask("image_gray", temperature=1.5, seed=7).token_ids() != first
    assert ask(temperature=1.5, seed=8).token_ids() != first


def whole_words(answer: Answer) -> str:
    """Some of the answer's text that a stop string can be made of."""
    found = re.search(r"[ -~]{2,}", answer.text()[1:])
    assert found, answer.text()
    return found.group()[:2]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_stop_strings_end_the_answer_before_them(ask: Ask, stream: bool) -> None:
    plain = ask(max_tokens=40)
    stop = whole_words(plain)
    before = plain.text()[: plain.text().index(stop)]
    stopped = ask(max_tokens=40, stop=stop, stream=stream)
    assert stopped.text() == before
    assert stopped.finish_reason() == "stop"
    kept = ask(max_tokens=40, stop=["\x00never", stop], include_stop_str_in_output=True, stream=stream)
    assert kept.text() == before + stop


def test_stop_token_ids_and_min_tokens(ask: Ask) -> None:
    plain = ask().token_ids()
    stop = plain[4]
    assert ask(stop_token_ids=[stop]).token_ids() == plain[: plain.index(stop) + 1]
    assert ask(stop_token_ids=[stop]).finish_reason() == "stop"
    held = ask(stop_token_ids=[stop], min_tokens=9)
    assert len(held.token_ids()) >= 9
    assert stop not in held.token_ids()[:9]


def test_the_end_token_ends_unless_it_is_ignored(ask: Ask) -> None:
    bias = {"logit_bias": {"2": 100}}
    ended = ask(ignore_eos=False, **bias)
    assert (ended.token_ids(), ended.text(), ended.finish_reason()) == ([2], "", "stop")
    assert ask(ignore_eos=True, **bias).token_ids() == [2] * 12
    assert len(ask(ignore_eos=False, min_tokens=5, **bias).token_ids()) == 6


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_max_tokens_is_exact(ask: Ask, max_tokens: int) -> None:
    answer = ask(max_tokens=max_tokens, stream=True)
    assert len(answer.token_ids()) == max_tokens
    assert answer.finish_reason() == "length"


@pytest.mark.parametrize("name", ["text", "image_gray"])
@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 50.0}]
)
def test_penalties_bring_other_tokens(ask: Ask, name: str, penalty: dict[str, float]) -> None:
    few = {"allowed_token_ids": list(range(300, 320)), "max_tokens": 20}
    plain = ask(name, **few).token_ids()
    penalised = ask(name, **few, **penalty).token_ids()
    assert len(set(penalised)) > len(set(plain))


def test_logit_bias_allowed_token_ids_and_bad_words(ask: Ask) -> None:
    assert ask(logit_bias={"77": 100}).token_ids() == [77] * 12
    assert set(ask(allowed_token_ids=[50, 51], temperature=1).token_ids()) <= {50, 51}
    entries = ask(max_tokens=40, logprobs=0).increments[0].logprobs[0]
    assert entries is not None
    texts = {token: value["decoded_token"] for entry in entries for token, value in entry.items()}
    token, word = next((token, text) for token, text in texts.items() if re.fullmatch("[!-~]", text))
    assert int(token) not in ask(max_tokens=40, bad_words=[word]).token_ids()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities_are_one_entry_a_token(ask: Ask, stream: bool, count: int) -> None:
    answer = ask(logprobs=count, stream=stream)
    entries = [entry for part in answer.increments for entry in part.logprobs[0] or ()]
    assert len(entries) == len(answer.token_ids()) == 12
    for increment in answer.increments:
        assert len(increment.logprobs[0] or ()) == increment.num_output_tokens[0]
    for token, entry in zip(answer.token_ids(), entries, strict=True):
        assert max(count, 1) <= len(entry) <= count + 1
        assert entry[str(token)]["rank"] == 1
    total = sum(
        entry[str(token)]["logprob"] for token, entry in zip(answer.token_ids(), entries, strict=True)
    )
    cumulative = answer.increments[-1].cumulative_logprobs[0]
    assert cumulative is not None
    assert math.isclose(total, cumulative, abs_tol=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("constraint", "accepts"),
    [
        ({"regex": "[abc]{4}"}, lambda text: re.fullmatch("[abc]{4}", text)),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"json": SCHEMA}, lambda text: json.loads(text) in ({"ok": True}, {"ok": False})),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["ok"] in (True, False)),
        ({"json": {"enum": ["red", "green"]}}, lambda text: json.loads(text) in ("red", "green")),
        ({"grammar": 'root ::= "a" | "b"'}, lambda text: text in ("a", "b")),
    ],
    ids=["regex", "choice", "json", "json text", "enum", "grammar"],
)
def test_structured_outputs(ask: Ask, constraint: dict[str, Any], accepts: Any, stream: bool) -> None:
    # Hot, so that the tiny model does not spend itself on the white space that JSON allows.
    sampling = {"temperature": 2, "seed": 1, "max_tokens": 1000, "ignore_eos": False}
    answer = ask("image_gray", stream, structured_outputs=constraint, **sampling)
    assert answer.finish_reason() == "stop"
    assert accepts(answer.text()), answer.text()


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"$ref": "#"}},  # this one by the engine, when it compiles it
        {"json": functools.reduce(lambda inner, _: {"allOf": [inner]}, range(300), {"type": "string"})},
        {"json": {"type": "string", "pattern": "("}},
        {"json": "{"},
        {"grammar": "garbage ::="},
        {"structural_tag": "{}"},
    ],
    ids=lambda constraint: json.dumps(constraint)[:40],
)
def test_a_constraint_that_the_backend_refuses(
    shared_engine: Engine, make_shared: Make, ask: Ask, constraint: dict[str, Any]
) -> None:
    error = refusal(shared_engine, make_shared, structured_outputs=constraint)
    assert error.field == "sampling_parameters.structured_outputs"
    assert "\n" not in error.problem
    assert ask(max_tokens=1).finish_reason() == "length"  # the engine is well


def test_prompt_logprobs_are_refused(shared_engine: Engine, make_shared: Make) -> None:
    error = refusal(shared_engine, make_shared, prompt_logprobs=1)
    assert error.field == "sampling_parameters.prompt_logprobs"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_thinking_is_told_apart(
    shared_engine: Engine, make_shared: Make, stream: bool, skip_special_tokens: bool
) -> None:
    tokens = shared_engine.facts.thinking_tokens
    assert tokens is not None
    grammar = 'root ::= "<think>hm, yes</think>the answer"'
    sampling = {
        "temperature": 0,
        "max_tokens": 60,
        "structured_outputs": {"grammar": grammar},
        "skip_special_tokens": skip_special_tokens,
        "logit_bias": {str(tokens.start): 100, str(tokens.end): 100},  # the tags as tokens, not spelled
        "stop": "!never",  # holds text back, so that it lags behind its tokens
    }
    generation = make_shared("thinking", stream, json.dumps(sampling))
    answer = submit(shared_engine, generation)
    assert answer.wait() is None
    assert {tokens.start, tokens.end} <= set(answer.token_ids())
    splitter = shared_engine.answer_splitter(generation)
    parts = [splitter.split(increment) for increment in answer.increments]
    assert "".join(thinking for (thinking,), _ in parts) == "hm, yes"
    assert "".join(text for _, (text,) in parts) == "the answer"
    assert answer.text() == "<think>hm, yes</think>the answer"
