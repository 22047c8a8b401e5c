"""sampling_parameters: strict types, the checkpoint's defaults, vLLM's reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.llm import sampling
from minicpmo_triton.llm.sampling import Sampling, parse_sampling_parameters

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def read(text: bytes | str | None, adapters: Mapping[str, Any] | None = None) -> Sampling:
    return parse_sampling_parameters(
        text, DEFAULTS, num_input_tokens=10, max_model_len=100, vocab_size=512, adapters=adapters
    )


def parse(
    text: bytes | str | None, defaults: Mapping[str, Any] = DEFAULTS, num_input_tokens: int = 10
) -> Any:
    return parse_sampling_parameters(
        text, defaults, num_input_tokens=num_input_tokens, max_model_len=100, vocab_size=512
    ).params


def refusal(text: bytes | str, adapters: Mapping[str, Any] | None = None) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        read(text, adapters)
    return caught.value


@pytest.mark.parametrize("text", [None, b"", "", "{}", b"{}", '{"temperature": null}'])
def test_defaults_are_the_checkpoints_and_all_of_the_context(text: bytes | str | None) -> None:
    params = parse(text)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert params.max_tokens == 90


def test_a_value_replaces_its_default_only() -> None:
    params = parse('{"top_p": 0.5}')
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)


@pytest.mark.parametrize(
    ("text", "defaults", "expected"),
    [
        ('{"max_tokens": 7}', DEFAULTS, 7),
        ('{"max_tokens": 91}', DEFAULTS, 90),
        ("{}", {"max_tokens": 16}, 16),
        ('{"max_tokens": 32}', {"max_tokens": 16}, 32),
    ],
)
def test_max_tokens_is_clamped_to_the_context(text: str, defaults: dict[str, Any], expected: int) -> None:
    assert parse(text, defaults).max_tokens == expected


def test_values_reach_vllm_with_its_types() -> None:
    params = parse(
        '{"n": 2, "temperature": 1, "stop": "END", "logit_bias": {"7": 1000, "8": -1}, "logprobs": 0,'
        ' "structured_outputs": {"choice": ["yes", "no"]}, "skip_special_tokens": false, "seed": -5}'
    )
    assert params.n == 2
    assert params.temperature == 1.0
    assert isinstance(params.temperature, float)
    assert params.stop == ["END"]
    assert params.logit_bias == {7: 100.0, 8: -1.0}
    assert params.logprobs == 0
    assert params.structured_outputs.choice == ["yes", "no"]
    assert params.skip_special_tokens is False
    assert params.seed == -5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", '"hot"'),
        ("temperature", '"NaN"'),
        ("temperature", '"1e999"'),
        ("temperature", '" 1"'),
        ("temperature", '""'),
        ("temperature", "true"),
        ("temperature", "1e999"),
        ("top_k", "20.0"),
        ("top_k", "true"),
        ("max_tokens", '"16.0"'),
        ("max_tokens", '"0x10"'),
        ("max_tokens", '"99999999999999999999"'),
        ("max_tokens", "99999999999999999999999"),
        ("seed", "1e3"),
        ("ignore_eos", "1"),
        ("ignore_eos", '"yes"'),
        ("stop", "5"),
        ("stop", "[1]"),
        ("stop_token_ids", "[1, true]"),
        ("stop_token_ids", "3"),
        ("bad_words", '"x"'),
        ("logit_bias", "[1]"),
        ("logit_bias", '{"a": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"1": "2"}'),
        ("structured_outputs", '"json"'),
        ("structured_outputs", "[1]"),
        ("repetition_detection", "1"),
    ],
)
def test_wrong_types_are_refused_with_the_key(key: str, value: str) -> None:
    error = refusal(f'{{"{key}": {value}}}')
    assert error.field == f"sampling_parameters.{key}"
    assert "expected" in error.problem


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", "-1", "non-negative"),
        ("top_p", "0", r"\(0, 1\]"),
        ("top_k", "-2", "top_k must be"),
        ("presence_penalty", "3", r"\[-2, 2\]"),
        ("max_tokens", "0", "at least 1"),
        ("n", "0", "at least 1"),
        ("stop", '[""]', "empty string"),
    ],
)
def test_what_vllm_refuses_comes_with_its_reason(key: str, value: str, reason: str) -> None:
    error = refusal(f'{{"{key}": {value}}}')
    assert error.field == f"sampling_parameters.{key}"
    assert re.search(reason, error.problem)


@pytest.mark.parametrize("key", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
@pytest.mark.parametrize("token", [-1, 512])
def test_token_ids_out_of_the_vocabulary_never_reach_the_device(key: str, token: int) -> None:
    error = refusal(f'{{"{key}": [3, {token}]}}')
    assert error.field == f"sampling_parameters.{key}"
    assert "vocabulary of 512" in error.problem


def test_logit_bias_out_of_the_vocabulary_is_refused() -> None:
    assert refusal('{"logit_bias": {"512": 1}}').field == "sampling_parameters.logit_bias"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "JSON object"),
        ("7", "JSON object"),
        ("{", "not valid JSON"),
        (b"\xff\xfe{", "not valid"),
        ('{"temperature": NaN}', "NaN is no JSON number"),
        ('{"temperature": Infinity}', "Infinity is no JSON number"),
        ('{"stop": "\\ud800"}', "UTF-8"),
        ('{"structured_outputs": ' + '{"json":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes | str, problem: str) -> None:
    error = refusal(text)
    assert error.field == "sampling_parameters"
    assert problem in error.problem


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    error = refusal('{"temprature": 1}')
    assert error.field == "sampling_parameters.temprature"
    assert "temperature" in error.problem


@pytest.mark.parametrize("key", ["output_kind", "detokenize", "extra_args", "skip_clone", "prompt_logprobs"])
def test_keys_the_server_needs_for_itself_are_refused_with_a_reason(key: str) -> None:
    error = refusal(f'{{"{key}": 1}}')
    assert error.field == f"sampling_parameters.{key}"
    assert error.problem == f"cannot be set: {sampling.REFUSED[key]}"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ('{"regex": "a", "choice": ["b"]}', ""),
        ("{}", ""),
        ('{"disable_any_whitespace": true}', ""),
        ('{"schema": {}}', ".schema"),
        ('{"json": 7}', ".json"),
        ('{"json": null, "regex": "a"}', ".json"),
        ('{"regex": 7}', ".regex"),
        ('{"choice": "yes"}', ".choice"),
        ('{"choice": []}', ".choice"),
        ('{"choice": ["a", 1]}', ".choice"),
        ('{"choice": [""]}', ".choice"),
        ('{"json_object": false}', ".json_object"),
        ('{"grammar": {}}', ".grammar"),
        ('{"regex": "a", "disable_any_whitespace": 1}', ".disable_any_whitespace"),
    ],
)
def test_a_wrong_constraint_is_refused(value: str, key: str) -> None:
    error = refusal(f'{{"structured_outputs": {value}}}')
    assert error.field == f"sampling_parameters.structured_outputs{key}"


@pytest.mark.parametrize(
    "text",
    [
        '{"structured_outputs": {"json": {"type": "object"}}}',
        '{"structured_outputs": "{\\"json\\": {\\"type\\": \\"object\\"}}"}',
        '{"guided_decoding": {"json": {"type": "object"}}}',
        '{"guided_decoding": {"json": {"type": "object"}, "backend": "auto"}}',
        '{"guided_decoding": "{\\"json\\": {\\"type\\": \\"object\\"}}", "structured_outputs": null}',
    ],
)
def test_every_spelling_of_structured_outputs(text: str) -> None:
    assert json.loads(parse(text).structured_outputs.json) == {"type": "object"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}', "guided_decoding"),
        ('{"guided_decoding": {"regex": "a", "backend": "outlines"}}', "guided_decoding.backend"),
        ('{"guided_decoding": 5}', "guided_decoding"),
        ('{"guided_decoding": {"regex": 5}}', "structured_outputs.regex"),
    ],
)
def test_guided_decoding_is_held_to_the_same(text: str, field: str) -> None:
    assert refusal(text).field == f"sampling_parameters.{field}"


def test_numbers_and_booleans_may_come_in_quotes_as_in_tritons_vllm_backend() -> None:
    params = parse(
        '{"temperature": "0.1", "top_p": "1", "min_p": ".5", "repetition_penalty": "1e0", "max_tokens": "7",'
        ' "seed": "-3", "ignore_eos": "true", "skip_special_tokens": "False", "stop": "5"}'
    )
    assert (params.temperature, params.top_p, params.min_p, params.repetition_penalty) == (0.1, 1, 0.5, 1)
    assert (params.max_tokens, params.seed) == (7, -3)
    assert params.ignore_eos is True
    assert params.skip_special_tokens is False
    assert params.stop == ["5"]


def test_lora_name_is_split_off() -> None:
    sampling = read('{"lora_name": "poet", "max_tokens": 7}', {"poet": object()})
    assert sampling.lora_name == "poet"
    assert sampling.params.max_tokens == 7
    assert read('{"lora_name": null}').lora_name is None
    assert read(None, {"poet": object()}).lora_name is None


@pytest.mark.parametrize(
    ("name", "adapters", "problem"),
    [
        ('"poet"', None, "LoRA feature is not enabled."),
        (
            '"nobody"',
            {"poet": 1, "cook": 2},
            "LoRA nobody is not supported, we currently support ['poet', 'cook']",
        ),
        ('""', {"poet": 1}, "LoRA  is not supported, we currently support ['poet']"),
        ("1", {"poet": 1}, "expected a string, got 1"),
    ],
)
def test_an_adapter_that_is_not_served(name: str, adapters: dict[str, int] | None, problem: str) -> None:
    error = refusal(f'{{"lora_name": {name}}}', adapters)
    assert error.field == "sampling_parameters.lora_name"
    assert error.problem == problem


def test_min_tokens_beyond_the_context_is_refused() -> None:
    assert refusal('{"min_tokens": 91}').field == "sampling_parameters.min_tokens"


def test_every_public_parameter_of_vllm_is_decided_on() -> None:
    from vllm import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    decided = sampling.ACCEPTED.keys() | sampling.REFUSED.keys()
    assert public <= decided
    assert not sampling.ACCEPTED.keys() & sampling.REFUSED.keys()
    # What this vLLM lacks came with a later version than the oldest one supported.
    assert decided - public <= {
        "stream_interval",
        "watermarking",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "trace_decode_token_ids",
    }
