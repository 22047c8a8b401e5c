"""What a client sends, parsed once into frozen dataclasses.

Every refusal is an :class:`InvalidArgument` that names the place: ``messages[1].content[0].text``,
``media_parameters.max_slice_nums``, ``image[2]``. Media stay undecoded here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from minicpmo_triton.errors import InvalidArgument

#: Most slices a request may ask for; a 6 x 6 grid, and 36 x 64 tokens, for one image.
MAX_SLICE_NUMS = 36
ROLES = ("system", "user", "assistant")
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")


@dataclass(frozen=True)
class RawRequest:
    """The input tensors of one request as bytes; ``None`` or empty where an input is absent."""

    text_input: bytes | None = None
    messages: bytes | None = None
    images: tuple[bytes, ...] = ()
    audios: tuple[bytes, ...] = ()
    media_parameters: bytes | None = None


@dataclass(frozen=True)
class MediaParameters:
    """``media_parameters`` of a request; ``None`` takes the checkpoint's default."""

    max_slice_nums: int | None = None
    use_image_id: bool | None = None
    omni_mode: bool = False
    enable_thinking: bool = False


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """``element`` is file bytes, base64 or a data URI; ``field`` names it in errors."""

    field: str
    element: bytes


@dataclass(frozen=True)
class AudioPart:
    """``element`` is file bytes, base64 or a data URI; ``field`` names it in errors."""

    field: str
    element: bytes


Part = TextPart | ImagePart | AudioPart


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    parameters: MediaParameters

    @property
    def images(self) -> list[ImagePart]:
        """Every image in the order of the conversation."""
        return [part for message in self.messages for part in message.parts if isinstance(part, ImagePart)]

    @property
    def audios(self) -> list[AudioPart]:
        """Every audio clip in the order of the conversation."""
        return [part for message in self.messages for part in message.parts if isinstance(part, AudioPart)]


def parse_request(raw: RawRequest) -> ChatRequest:
    """Parse and check one request; :class:`InvalidArgument` names the input, key or element at fault."""
    parameters = _parse_media_parameters(raw.media_parameters)
    if (raw.text_input is None) == (raw.messages is None):
        both = "not both" if raw.messages is not None else "neither is there"
        raise InvalidArgument("text_input", f"a request has either text_input or messages, {both}")
    messages: tuple[Message, ...]
    if raw.text_input is not None:
        messages = (_text_message(raw, raw.text_input),)
    else:
        messages = _MessagesParser(raw.images, raw.audios).parse(_load_json("messages", raw.messages or b""))
    return ChatRequest(messages, parameters)


def _text_message(raw: RawRequest, text_input: bytes) -> Message:
    text = _decode_utf8("text_input", text_input)
    media: list[Part] = [ImagePart(f"image[{i}]", element) for i, element in enumerate(raw.images)]
    media += [AudioPart(f"audio[{i}]", element) for i, element in enumerate(raw.audios)]
    if not media and not text.strip():
        raise InvalidArgument("text_input", "is empty, and there is no image or audio")
    return Message("user", (*media, TextPart(text)) if text else tuple(media))


def _parse_media_parameters(data: bytes | None) -> MediaParameters:
    if not data:
        return MediaParameters()
    field = "media_parameters"
    values = _expect_object(field, _load_json(field, data), allowed=tuple(MediaParameters.__annotations__))
    for name, value in values.items():
        if name == "max_slice_nums":
            if type(value) is not int:
                _wrong_type(f"{field}.{name}", "an integer", value)
            if not 1 <= value <= MAX_SLICE_NUMS:
                raise InvalidArgument(f"{field}.{name}", f"expected 1 to {MAX_SLICE_NUMS}, got {value}")
        elif type(value) is not bool:
            _wrong_type(f"{field}.{name}", "true or false", value)
    return MediaParameters(**values)


class _MessagesParser:
    """Walks the messages and hands out the elements of the ``image`` and ``audio`` inputs in order."""

    def __init__(self, images: Sequence[bytes], audios: Sequence[bytes]) -> None:
        self._elements = {"image": images, "audio": audios}
        self._num_taken = {"image": 0, "audio": 0}

    def parse(self, value: object) -> tuple[Message, ...]:
        values = _expect_list("messages", value)
        messages = tuple(self._message(f"messages[{i}]", item) for i, item in enumerate(values))
        if messages[-1].role != "user":
            raise InvalidArgument(f"messages[{len(messages) - 1}].role", "the last message must be a user's")
        for name, num_taken in self._num_taken.items():
            if num_taken < len(self._elements[name]):
                raise InvalidArgument(f"{name}[{num_taken}]", f"no {name} part of messages takes it")
        return messages

    def _message(self, field: str, value: object) -> Message:
        item = _expect_object(field, value, required=("role", "content"))
        role = _expect_string(f"{field}.role", item["role"])
        if role not in ROLES:
            raise InvalidArgument(f"{field}.role", f"expected one of {', '.join(ROLES)}, got {role[:50]!r}")
        content = item["content"]
        if isinstance(content, str):
            parts: tuple[Part, ...] = (TextPart(_expect_string(f"{field}.content", content)),)
        elif isinstance(content, list):
            content = _expect_list(f"{field}.content", content)
            parts = tuple(self._part(f"{field}.content[{i}]", part) for i, part in enumerate(content))
        else:
            _wrong_type(f"{field}.content", "a string or a list of parts", content)
        self._check_parts(field, role, parts)
        return Message(role, parts)

    @staticmethod
    def _check_parts(field: str, role: str, parts: tuple[Part, ...]) -> None:
        for i, part in enumerate(parts):
            # The chat template drops an earlier answer's reasoning, and media in it would be lost.
            if role == "assistant" and not isinstance(part, TextPart):
                raise InvalidArgument(f"{field}.content[{i}].type", "an assistant's message holds only text")
        if role == "user" and not any(not isinstance(part, TextPart) or part.text.strip() for part in parts):
            raise InvalidArgument(f"{field}.content", "is empty")

    def _part(self, field: str, value: object) -> Part:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "text":
            return TextPart(_expect_string(f"{field}.text", _only(field, value, "text")))
        if kind == "image":
            return ImagePart(*self._next_element(field, value, "image"))
        if kind == "audio":
            return AudioPart(*self._next_element(field, value, "audio"))
        if kind == "image_url":
            return _image_url(f"{field}.image_url", _only(field, value, "image_url"))
        if kind == "input_audio":
            return _input_audio(f"{field}.input_audio", _only(field, value, "input_audio"))
        _expect_object(field, value, required=("type",), allowed=None)
        known = "text, image, audio, image_url or input_audio"
        raise InvalidArgument(f"{field}.type", f"expected {known}, got {str(kind)[:50]!r}")

    def _next_element(self, field: str, value: object, name: str) -> tuple[str, bytes]:
        _expect_object(field, value, required=("type",))
        index = self._num_taken[name]
        self._num_taken[name] += 1
        if index >= len(self._elements[name]):
            raise InvalidArgument(
                field, f"takes {name}[{index}], but the {name} input has {len(self._elements[name])} elements"
            )
        return f"{name}[{index}]", self._elements[name][index]


def _image_url(field: str, value: object) -> ImagePart:
    url = _expect_string(f"{field}.url", _expect_object(field, value, required=("url",))["url"])
    if not url[:5].lower() == "data:":
        raise InvalidArgument(
            f"{field}.url", "expected a data URI (data:<type>;base64,<data>); the server fetches nothing"
        )
    return ImagePart(f"{field}.url", url.encode())


def _input_audio(field: str, value: object) -> AudioPart:
    item = _expect_object(field, value, required=("data",), allowed=("format",))
    if "format" in item and _expect_string(f"{field}.format", item["format"]) not in AUDIO_FORMATS:
        raise InvalidArgument(f"{field}.format", f"expected one of {', '.join(AUDIO_FORMATS)}")
    return AudioPart(f"{field}.data", _expect_string(f"{field}.data", item["data"]).encode())


def _only(field: str, value: object, key: str) -> object:
    """The value beside ``type`` of a part that has just these two keys."""
    return _expect_object(field, value, required=("type", key))[key]


def _expect_object(
    field: str, value: object, required: tuple[str, ...] = (), allowed: tuple[str, ...] | None = ()
) -> dict[str, Any]:
    """An object with all of ``required``, and of other keys only ``allowed`` (None: any)."""
    if not isinstance(value, dict):
        _wrong_type(field, "an object", value)
    for key in required:
        if key not in value:
            raise InvalidArgument(f"{field}.{key}", "is missing")
    known = None if allowed is None else required + allowed
    for key in value:
        if known is not None and key not in known:
            raise InvalidArgument(f"{field}.{key[:50]}", f"is unknown; known are {', '.join(known)}")
    return value


def _expect_list(field: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        _wrong_type(field, "a list", value)
    if not value:
        raise InvalidArgument(field, "is empty")
    return value


def _expect_string(field: str, value: object) -> str:
    if not isinstance(value, str):
        _wrong_type(field, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON's \ud800 escapes can spell half a character
        raise InvalidArgument(field, "holds a lone surrogate, which is no character") from None
    return value


def _wrong_type(field: str, expected: str, value: object) -> NoReturn:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    raise InvalidArgument(field, f"expected {expected}, got {names.get(type(value), 'a number')}")


def _decode_utf8(field: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"is not valid UTF-8 at byte {error.start}") from None


def _load_json(field: str, data: bytes) -> object:
    try:
        value: object = json.loads(_decode_utf8(field, data))
    except json.JSONDecodeError as error:
        raise InvalidArgument(field, f"is not valid JSON: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or nesting as deep
        raise InvalidArgument(field, "is not acceptable JSON: a number or the nesting is too large") from None
    return value
