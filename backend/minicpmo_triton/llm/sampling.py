"""``sampling_parameters``: a JSON object from the client becomes vLLM's SamplingParams.

Types are strict: a boolean is no integer, NaN is refused. As in Triton's vLLM backend a number or a
boolean may come in quotes, ``structured_outputs`` as text, and ``lora_name`` names an adapter. ``null`` is
the same as leaving a key out. Every refusal names ``sampling_parameters.<key>``.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.llm import structured
from minicpmo_triton.llm.lora import check_lora_name

if TYPE_CHECKING:
    from vllm import SamplingParams

FIELD = "sampling_parameters"
LORA_NAME = "lora_name"


@dataclass(frozen=True)
class Sampling:
    """How one request is to be answered."""

    params: SamplingParams
    lora_name: str | None = None  # of an adapter that is served


class Kind(NamedTuple):
    """A JSON type: how a message calls it and which values it takes."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    # 64 bits are what the engine's messages carry.
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


def _is_list_of(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(item, value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_token_key, value)) and all(map(_is_number, value.values()))


def _is_token_key(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 19


_INT = Kind("an integer", _is_int)
_NUMBER = Kind("a finite number", _is_number)
_BOOL = Kind("true or false", lambda value: isinstance(value, bool))
_INTS = Kind("a list of integers", _is_list_of(_is_int))
_STRINGS = Kind("a list of strings", _is_list_of(_is_str))
_STOP = Kind("a string or a list of strings", lambda value: _is_str(value) or _is_list_of(_is_str)(value))
_BIAS = Kind("an object of token ids and finite numbers", _is_bias)
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))

#: What a client may set. A test holds this and REFUSED against vLLM's class.
ACCEPTED: dict[str, Kind] = {
    "n": _INT,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INT,
    "min_p": _NUMBER,
    "seed": _INT,
    "stop": _STOP,
    "stop_token_ids": _INTS,
    "bad_words": _STRINGS,
    "ignore_eos": _BOOL,
    "max_tokens": _INT,
    "min_tokens": _INT,
    "logprobs": _INT,
    "logprob_token_ids": _INTS,
    "skip_special_tokens": _BOOL,
    "spaces_between_special_tokens": _BOOL,
    "include_stop_str_in_output": _BOOL,
    "stream_interval": _INT,
    structured.NAME: _OBJECT,
    "logit_bias": _BIAS,
    "allowed_token_ids": _INTS,
    "skip_reading_prefix_cache": _BOOL,
    "thinking_token_budget": _INT,
    "repetition_detection": _OBJECT,
}

#: What vLLM has and a client may not set, and why.
REFUSED: dict[str, str] = {
    "output_kind": "the input `stream` decides it",
    "detokenize": "answers are text",
    "flat_logprobs": "the answer's layout is fixed",
    "prompt_logprobs": "answers carry no log probabilities of the prompt",
    "prompt_logprob_token_ids": "answers carry no log probabilities of the prompt",
    "prompt_logprob_start": "answers carry no log probabilities of the prompt",
    "extra_args": "it reaches into the engine",
    "skip_clone": "it is internal to vLLM",
    "output_text_buffer_length": "it is internal to vLLM",
    "watermarking": "it is the operator's choice (engine arguments)",
    "routed_experts_prompt_start": "the model has no experts",
    "trace_decode_token_ids": "it is for debugging the engine",
}

_STRUCTURED_CHECK = "_validate_structured_outputs"  # vLLM's method of SamplingParams
_TOKEN_KEYS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def parse_sampling_parameters(
    text: bytes | str | None,
    defaults: Mapping[str, Any],
    *,
    num_input_tokens: int,
    max_model_len: int,
    vocab_size: int,
    adapters: Mapping[str, Any] | None = None,
) -> Sampling:
    """SamplingParams and adapter of one request; ``None`` or empty text takes the defaults.

    ``defaults`` are the checkpoint's (``temperature``, ``top_k``, ``top_p``, …), ``adapters`` the LoRA
    adapters by name, None where LoRA is off. As in vLLM's server, ``max_tokens`` defaults to what the
    context leaves and a larger one is clamped to that. Raises :class:`InvalidArgument` naming the key,
    with vLLM's reason where vLLM refuses the value.
    """
    from vllm import SamplingParams

    given = _parse_object(text)
    lora_name = _take_lora_name(given, adapters)
    structured.rename_old(given, FIELD)
    for key, value in given.items():
        given[key] = _unquote(key, value)
        _check(key, given[key], SamplingParams.__struct_fields__)
    values = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    _check_token_ids(values, vocab_size)
    available = max(max_model_len - num_input_tokens, 1)
    values["max_tokens"] = min(values.get("max_tokens", available), available)
    if values.get("min_tokens", 0) > max(values["max_tokens"], 0):  # vLLM refuses max_tokens itself
        raise InvalidArgument(
            f"{FIELD}.min_tokens",
            f"{values['min_tokens']} is more than max_tokens or the context allow ({values['max_tokens']})",
        )
    try:
        _convert(values)
        return Sampling(SamplingParams(**values), lora_name)
    except _refusals() as error:
        raise refused_by_vllm(error) from error


def refused_by_vllm(error: BaseException) -> InvalidArgument:
    """vLLM's refusal of a request, naming the sampling parameter where vLLM does."""
    reason = " ".join((str(error.args[0]) if error.args else str(error)).split())
    key = getattr(error, "parameter", None) or next(iter(reason.split(maxsplit=1)), "").strip("`")
    # The reasons of the backends for structured outputs name no parameter.
    if any(frame.f_code.co_name == _STRUCTURED_CHECK for frame, _ in traceback.walk_tb(error.__traceback__)):
        key = structured.NAME
    return InvalidArgument(f"{FIELD}.{key}" if key in ACCEPTED else FIELD, reason)


def _refusals() -> tuple[type[Exception], ...]:
    from vllm.exceptions import VLLMValidationError  # a ValueError in vLLM 0.26, not in 0.32

    return VLLMValidationError, ValueError, TypeError


def _parse_object(text: bytes | str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # A lone surrogate ("\ud800") is valid JSON, and no text: the engine could not send it on.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise InvalidArgument(FIELD, "is not valid UTF-8 text") from None
    except RecursionError:
        raise InvalidArgument(FIELD, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(FIELD, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(FIELD, f"must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _take_lora_name(given: dict[str, Any], adapters: Mapping[str, Any] | None) -> str | None:
    name = given.pop(LORA_NAME, None)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"{FIELD}.{LORA_NAME}", f"expected a string, got {json.dumps(name)[:60]}")
    check_lora_name(name, adapters)
    return name


def _unquote(key: str, value: Any) -> Any:
    """The number, boolean or object that a string spells, for a key of that type."""
    if not isinstance(value, str):
        return value
    kind = ACCEPTED.get(key)
    if kind is _BOOL:
        return {"true": True, "false": False}.get(value.lower(), value)
    if kind in (_INT, _NUMBER) and re.fullmatch(r"-?[0-9]{1,19}", value, re.ASCII):
        return int(value)
    if kind is _NUMBER and re.fullmatch(r"-?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", value, re.ASCII):
        return float(value)
    if key == structured.NAME:
        return structured.as_object(value, f"{FIELD}.{key}")
    return value


def _check(key: str, value: Any, known: tuple[str, ...]) -> None:
    if key in REFUSED and key in known:
        raise InvalidArgument(f"{FIELD}.{key}", f"cannot be set: {REFUSED[key]}")
    kind = ACCEPTED.get(key)
    if kind is None or key not in known:
        choices = ", ".join((*(name for name in ACCEPTED if name in known), LORA_NAME))
        raise InvalidArgument(f"{FIELD}.{key}", f"unknown key; known are {choices}")
    if value is not None and not kind.accepts(value):
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidArgument(f"{FIELD}.{key}", f"expected {kind.expected}, got {shown}")
    if key == structured.NAME and value is not None:
        structured.check_constraint(value, f"{FIELD}.{key}")


def _check_token_ids(values: Mapping[str, Any], vocab_size: int) -> None:
    """Token ids become indices into the logits on the device, where vLLM 0.26 does not check them all."""
    for key in (*_TOKEN_KEYS, "logit_bias"):
        for token in map(int, values.get(key, ())):
            if not 0 <= token < vocab_size:
                raise InvalidArgument(
                    f"{FIELD}.{key}", f"token id {token} is not in the vocabulary of {vocab_size}"
                )


def _convert(values: dict[str, Any]) -> None:
    """Give JSON values the types that SamplingParams holds, in place."""
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    for key, value in values.items():
        if ACCEPTED[key] is _NUMBER:
            values[key] = float(value)
    if bias := values.get("logit_bias"):
        # Clamped as OpenAI's API and vLLM's server do.
        values["logit_bias"] = {int(token): min(100.0, max(-100.0, float(x))) for token, x in bias.items()}
    if constraint := values.get(structured.NAME):
        structured.schema_to_text(constraint)
    for key, cls in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        if key in values:
            try:
                values[key] = cls(**values[key])
            except _refusals() as error:
                reason = " ".join(str(error).split())
                raise InvalidArgument(f"{FIELD}.{key}", reason) from error
