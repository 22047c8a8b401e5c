"""What a chat is on the wire, without any transport: messages to input tensors, output tensors to chunks.

The names are those of the server's ``minicpmo``, ``llm`` and ``encode`` models; a test holds them against
the server's schema. Both clients and every transport build on this module, and nothing here waits.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minicpmo_client.conversation import Messages, as_turns, json_bytes, json_object, take_media
from minicpmo_client.errors import InvalidRequest, ServerError
from minicpmo_client.media import Fetch

MESSAGES = "messages"
IMAGE = "image"
AUDIO = "audio"
VIDEO = "video"
MEDIA_PARAMETERS = "media_parameters"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
CANCEL_REQUEST_ID = "cancel_request_id"
#: ``llm``, used directly, sends beside the text only what these ask for; ``minicpmo`` always sends all.
RETURN_FLAGS = (
    "return_reasoning_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
#: Input name -> Triton data type. A BYTES input is a list of bytes, a BOOL one a single value.
INPUTS = {
    MESSAGES: "BYTES",
    IMAGE: "BYTES",
    AUDIO: "BYTES",
    VIDEO: "BYTES",
    MEDIA_PARAMETERS: "BYTES",
    STREAM: "BOOL",
    SAMPLING_PARAMETERS: "BYTES",
    CANCEL_REQUEST_ID: "BYTES",
    **dict.fromkeys(RETURN_FLAGS, "BOOL"),
}
#: Inputs that hold the bytes of files.
MEDIA = (IMAGE, AUDIO, VIDEO)

TEXT_OUTPUT = "text_output"
REASONING_OUTPUT = "reasoning_output"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
OUTPUTS = (
    TEXT_OUTPUT,
    REASONING_OUTPUT,
    FINISH_REASON,
    CUMULATIVE_LOGPROB,
    LOGPROBS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
)

DEFAULT_MODEL = "minicpmo"
#: The model that generates: its requests can be aborted by id, or directly.
ENGINE_MODEL = "llm"
ENCODE_MODEL = "encode"
#: Model -> its sibling that answers one request with one response, for HTTP ``infer``.
UNARY_MODELS = {DEFAULT_MODEL: "minicpmo_unary"}

#: How long a message that gives a chat up may take; a server that is busy may be slow to take it.
CANCEL_TIMEOUT_S = 10.0
_FIRST_RETRY_DELAY_S = 0.2
_MAX_RETRY_DELAY_S = 2.0

InputValue = Sequence[bytes] | bool


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
    None until the last increment. ``reasoning`` is what the model thought before it answered (with
    ``enable_thinking``), and no part of ``text``. What the server did not send is None, 0 for a count and
    empty for ``reasoning``.
    """

    text: str
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Chat:
    """A whole answer; the fields are those of :class:`Chunk`, over all increments."""

    text: str
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    reasoning: str = ""


def build_inputs(
    messages: Messages,
    *,
    images: Iterable[object] = (),
    audio: Iterable[object] = (),
    videos: Iterable[object] = (),
    sampling: Mapping[str, Any] | None = None,
    media_parameters: Mapping[str, Any] | None = None,
    stream: bool = True,
    fetch: Fetch | None = None,
) -> dict[str, InputValue]:
    """The input tensors of one chat; the arguments are those of ``Client.chat``.

    ``fetch`` gets the content of URLs; None refuses them.

    >>> build_inputs("Hello", sampling={"max_tokens": 8})["sampling_parameters"]
    [b'{"max_tokens": 8}']

    Raises:
        InvalidRequest: something in the arguments cannot be sent; the message names it.
    """
    turns, media = take_media(as_turns(messages, images, audio, videos), fetch)
    inputs: dict[str, InputValue] = {MESSAGES: [json_bytes(turns, MESSAGES)], STREAM: bool(stream)}
    inputs.update({name: items for name, items in media.items() if items})
    if sampling is not None:
        if isinstance(sampling, Mapping) and sampling.get("n", 1) != 1:
            raise InvalidRequest(f"sampling.n: a chat has one answer, got {sampling['n']!r}")
        inputs[SAMPLING_PARAMETERS] = [json_object(sampling, "sampling")]
    return {**inputs, **media_parameter_input(media_parameters)}


def media_parameter_input(parameters: Mapping[str, Any] | None) -> dict[str, InputValue]:
    """The input that carries ``parameters``, if any were given."""
    return {} if parameters is None else {MEDIA_PARAMETERS: [json_object(parameters, MEDIA_PARAMETERS)]}


def chat_request(model: str, request_id: str, inputs: Mapping[str, InputValue]) -> Request:
    """The request of one chat with ``model``; one that always answers whole takes no ``stream``."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id: expected a string, got {type(request_id).__name__}")
    if model in UNARY_MODELS.values():
        inputs = {name: value for name, value in inputs.items() if name != STREAM}
    if model == ENGINE_MODEL:
        inputs = {**inputs, **dict.fromkeys(RETURN_FLAGS, True)}
    return Request(model, request_id or uuid.uuid4().hex, inputs)


def cancel_request(request: Request) -> Request:
    """What tells the engine to abort ``request``.

    Triton (2.51) passes no cancel on to a step of an ensemble under way, and does not notice that the
    connection of an HTTP ``generate`` or ``infer`` has closed.

    >>> cancel_request(Request("minicpmo", "chat-1", {})).inputs
    {'cancel_request_id': [b'chat-1']}
    """
    return Request(ENGINE_MODEL, uuid.uuid4().hex, {CANCEL_REQUEST_ID: [request.request_id.encode()]})


def retry_delays_s(num_retries: int) -> Iterator[float]:
    """How long to wait before each retry.

    >>> list(retry_delays_s(5))
    [0.2, 0.4, 0.8, 1.6, 2.0]
    """
    for attempt in range(num_retries):
        yield min(_FIRST_RETRY_DELAY_S * 2**attempt, _MAX_RETRY_DELAY_S)


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
        reasoning=_text(first(REASONING_OUTPUT)),
    )


def join_chunks(chunks: Iterable[Chunk]) -> Chat:
    """The answer its increments make.

    >>> join_chunks([Chunk("A ", None, 5, 1), Chunk("cat", "stop", 5, 1)])
    Chat(text='A cat', finish_reason='stop', num_input_tokens=5, num_output_tokens=2, \
cumulative_logprob=None, logprobs=None, reasoning='')
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
        reasoning="".join(part.reasoning for part in parts),
    )


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
