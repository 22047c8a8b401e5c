"""What a chat is on the wire, without any transport: messages to input tensors, output tensors to chunks.

The names are those of the server's ``minicpmo`` model; a test holds them against the server's schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minicpmo_client.errors import InvalidRequest, ServerError
from minicpmo_client.media import audio_bytes, image_bytes

MESSAGES = "messages"
IMAGE = "image"
AUDIO = "audio"
MEDIA_PARAMETERS = "media_parameters"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
#: Input name -> Triton data type. A BYTES input is a list of bytes, the BOOL one a single value.
INPUTS = {
    MESSAGES: "BYTES",
    IMAGE: "BYTES",
    AUDIO: "BYTES",
    MEDIA_PARAMETERS: "BYTES",
    STREAM: "BOOL",
    SAMPLING_PARAMETERS: "BYTES",
}

TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, CUMULATIVE_LOGPROB, LOGPROBS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS)

#: A user turn as plain text, or messages in OpenAI's form.
Messages = str | Sequence[Mapping[str, Any]]
InputValue = Sequence[bytes] | bool

_ENCODERS: dict[str, Callable[[object, str], bytes]] = {IMAGE: image_bytes, AUDIO: audio_bytes}


@dataclass(frozen=True)
class Request:
    """One request as a transport sends it: ``inputs`` maps an input's name to its value."""

    model: str
    request_id: str
    inputs: Mapping[str, InputValue]


@dataclass(frozen=True)
class Response:
    """One response as a transport received it.

    ``outputs`` maps an output's name to its values (Python bytes and numbers), and is empty where the
    final response carries nothing but the flag. ``final`` is set on the request's last response.
    """

    outputs: Mapping[str, Sequence[Any]]
    final: bool = False


@dataclass(frozen=True)
class Chunk:
    """One increment of an answer.

    ``text`` and ``logprobs`` (per token, None unless asked for) belong to this increment, and
    ``num_output_tokens`` counts its tokens; ``num_input_tokens`` is the prompt's length.
    ``cumulative_logprob`` covers the answer up to here. ``finish_reason`` (``"stop"``, ``"length"``) is
    None until the last increment. What the server did not send is None, or 0 for a count.
    """

    text: str
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Chat:
    """A whole answer; the fields are those of :class:`Chunk`, over all increments."""

    text: str
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None


def build_inputs(
    messages: Messages,
    *,
    images: Iterable[object] = (),
    audio: Iterable[object] = (),
    sampling: Mapping[str, Any] | None = None,
    media_parameters: Mapping[str, Any] | None = None,
    stream: bool = True,
) -> dict[str, InputValue]:
    """The input tensors of one chat; the arguments are those of ``Client.chat``.

    >>> build_inputs("Hello", sampling={"max_tokens": 8})["sampling_parameters"]
    [b'{"max_tokens": 8}']

    Raises:
        InvalidRequest: something in the arguments cannot be sent; the message names it.
    """
    turns, media = _take_media(_as_turns(messages, images, audio))
    inputs: dict[str, InputValue] = {MESSAGES: [_json_bytes(turns, MESSAGES)], STREAM: bool(stream)}
    inputs.update({name: items for name, items in media.items() if items})
    if sampling is not None:
        if isinstance(sampling, Mapping) and sampling.get("n", 1) != 1:
            raise InvalidRequest(f"sampling.n: a chat has one answer, got {sampling['n']!r}")
        inputs[SAMPLING_PARAMETERS] = [_json_object(sampling, "sampling")]
    if media_parameters is not None:
        inputs[MEDIA_PARAMETERS] = [_json_object(media_parameters, MEDIA_PARAMETERS)]
    return inputs


def parse_chunk(outputs: Mapping[str, Sequence[Any]]) -> Chunk:
    """The first sequence of a response's outputs. :class:`ServerError` where they make no sense."""

    def first(name: str) -> Any:
        values = outputs.get(name)
        return values[0] if values else None

    reason, logprob = _text(first(FINISH_REASON)), first(CUMULATIVE_LOGPROB)
    try:
        logprobs = json.loads(_text(first(LOGPROBS)) or "null")
    except ValueError:
        raise ServerError("the server sent logprobs that are not JSON") from None
    return Chunk(
        text=_text(first(TEXT_OUTPUT)),
        finish_reason=reason if reason not in ("", "None", "null") else None,
        num_input_tokens=int(first(NUM_INPUT_TOKENS) or 0),
        num_output_tokens=int(first(NUM_OUTPUT_TOKENS) or 0),
        cumulative_logprob=None if logprob is None or math.isnan(logprob) else float(logprob),
        logprobs=logprobs,
    )


def join_chunks(chunks: Iterable[Chunk]) -> Chat:
    """The answer its increments make.

    >>> join_chunks([Chunk("A ", None, 5, 1), Chunk("cat", "stop", 5, 1)])
    Chat(text='A cat', finish_reason='stop', num_input_tokens=5, num_output_tokens=2, \
cumulative_logprob=None, logprobs=None)
    """
    parts = list(chunks)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Chat(
        text="".join(part.text for part in parts),
        finish_reason=parts[-1].finish_reason if parts else None,
        num_input_tokens=max((part.num_input_tokens for part in parts), default=0),
        num_output_tokens=sum(part.num_output_tokens for part in parts),
        cumulative_logprob=parts[-1].cumulative_logprob if parts else None,
        logprobs=[token for tokens in logprobs for token in tokens] if logprobs else None,
    )


def _as_turns(messages: Messages, images: Iterable[object], audio: Iterable[object]) -> Sequence[Any]:
    parts = _parts(IMAGE, images, "images") + _parts(AUDIO, audio, "audio")
    if isinstance(messages, str):
        content = [*parts, {"type": "text", "text": messages}] if parts else messages
        return [{"role": "user", "content": content}]
    if parts:
        raise InvalidRequest("images and audio go with a plain question; in messages they are content parts")
    if isinstance(messages, bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages: expected text or a list of messages, got {type(messages).__name__}")
    return messages


def _parts(kind: str, items: Iterable[object], field: str) -> list[dict[str, object]]:
    # A lone path or picture is the likeliest slip, and iterating over it would give nonsense.
    if isinstance(items, str | bytes) or not isinstance(items, list | tuple):
        raise InvalidRequest(f"{field}: expected a list, got {type(items).__name__}")
    return [{"type": kind, kind: item} for item in items]


def _take_media(messages: Sequence[Any]) -> tuple[list[Any], dict[str, list[bytes]]]:
    """Messages whose image and audio parts are bare placeholders, and what they held, in order."""
    media: dict[str, list[bytes]] = {IMAGE: [], AUDIO: []}
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where}: expected an object, got {type(message).__name__}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [_take_part(part, media, f"{where}.content[{i}]") for i, part in enumerate(content)]
            message = {**message, "content": parts}
        turns.append(dict(message))
    return turns, media


def _take_part(part: object, media: Mapping[str, list[bytes]], where: str) -> object:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where}: expected an object with a type, got {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in media:
        return dict(part)
    if kind not in part:
        raise InvalidRequest(f"{where}.{kind}: is missing; give a path, bytes or an array")
    media[kind].append(_ENCODERS[kind](part[kind], f"{where}.{kind}"))
    return {key: value for key, value in part.items() if key != kind}


def _json_object(value: object, field: str) -> bytes:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field}: expected a mapping, got {type(value).__name__}")
    return _json_bytes(dict(value), field)


def _json_bytes(value: object, field: str) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: cannot be written as JSON: {error}") from None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
