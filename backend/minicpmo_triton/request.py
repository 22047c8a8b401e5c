"""What a client sends, parsed once into frozen dataclasses.

Every refusal is an :class:`InvalidArgument` that names the place: ``messages[1].content[0].text``,
``media_parameters.max_slice_nums``, ``image[2]``. Media stay undecoded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.json_checks import (
    decode_utf8,
    expect_list,
    expect_object,
    expect_string,
    load_json,
    wrong_type,
)

#: Most slices a request may ask for; a 6 x 6 grid, and 36 x 64 tokens, for one image.
MAX_SLICE_NUMS = 36
#: Most frames of all videos of a request; 512 x 66 tokens nearly fill the model's context.
MAX_FRAMES = 512
MAX_VIDEO_FPS = 1000
ROLES = ("system", "user", "assistant")
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
IMAGE_DETAILS = ("auto", "low", "high")


@dataclass(frozen=True)
class RawRequest:
    """The input tensors of one request as bytes; ``None`` or empty where an input is absent."""

    text_input: bytes | None = None
    messages: bytes | None = None
    images: tuple[bytes, ...] = ()
    audios: tuple[bytes, ...] = ()
    media_parameters: bytes | None = None
    videos: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class MediaParameters:
    """``media_parameters`` of a request; ``None`` takes the checkpoint's default.

    ``video_fps`` frames a second are taken of a video, fewer where that is over ``max_frames`` of it.
    """

    max_slice_nums: int | None = None
    use_image_id: bool | None = None
    omni_mode: bool = False
    enable_thinking: bool = False
    video_fps: float = 1
    max_frames: int = 64


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """``element`` is file bytes, base64 or a data URI; ``field`` names it in errors.

    ``max_slice_nums`` of this image goes before the request's.
    """

    field: str
    element: bytes
    max_slice_nums: int | None = None


@dataclass(frozen=True)
class AudioPart:
    """``element`` is file bytes, base64 or a data URI; ``field`` names it in errors."""

    field: str
    element: bytes


@dataclass(frozen=True)
class VideoPart:
    """``element`` is file bytes, base64 or a data URI; ``field`` names it in errors."""

    field: str
    element: bytes


@dataclass(frozen=True)
class FramePart:
    """A video's frame, in the place of its :class:`VideoPart` once that is decoded."""


@dataclass(frozen=True)
class SoundPart:
    """A second of a video's sound, in the place of its :class:`VideoPart` once that is decoded."""


MediaPart = ImagePart | AudioPart | VideoPart
Part = TextPart | MediaPart | FramePart | SoundPart


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    parameters: MediaParameters

    @property
    def parts(self) -> Iterator[Part]:
        """Every part in the order of the conversation."""
        return (part for message in self.messages for part in message.parts)

    @property
    def images(self) -> list[ImagePart]:
        """Every image in the order of the conversation."""
        return [part for part in self.parts if isinstance(part, ImagePart)]

    @property
    def audios(self) -> list[AudioPart]:
        """Every audio clip in the order of the conversation."""
        return [part for part in self.parts if isinstance(part, AudioPart)]

    @property
    def videos(self) -> list[VideoPart]:
        """Every video in the order of the conversation."""
        return [part for part in self.parts if isinstance(part, VideoPart)]

    def with_videos(self, decoded: Iterable[Sequence[FramePart | SoundPart]]) -> ChatRequest:
        """Each video's parts, in the order of the conversation, in the place of the video."""
        queue = iter(decoded)

        def parts(message: Message) -> Iterator[Part]:
            for part in message.parts:
                if isinstance(part, VideoPart):
                    yield from next(queue)
                else:
                    yield part

        return replace(self, messages=tuple(Message(m.role, tuple(parts(m))) for m in self.messages))


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
        inputs = {"image": raw.images, "audio": raw.audios, "video": raw.videos}
        messages = _MessagesParser(inputs).parse(load_json("messages", raw.messages or b""))
    return ChatRequest(messages, parameters)


def _text_message(raw: RawRequest, text_input: bytes) -> Message:
    text = decode_utf8("text_input", text_input)
    media: list[Part] = [ImagePart(f"image[{i}]", element) for i, element in enumerate(raw.images)]
    media += [AudioPart(f"audio[{i}]", element) for i, element in enumerate(raw.audios)]
    media += [VideoPart(f"video[{i}]", element) for i, element in enumerate(raw.videos)]
    if not media and not text.strip():
        raise InvalidArgument("text_input", "is empty, and there is no image, audio or video")
    return Message("user", (*media, TextPart(text)) if text else tuple(media))


_MAX_INTEGERS = {"max_slice_nums": MAX_SLICE_NUMS, "max_frames": MAX_FRAMES}


def _parse_media_parameters(data: bytes | None) -> MediaParameters:
    if not data:
        return MediaParameters()
    field = "media_parameters"
    values = expect_object(field, load_json(field, data), allowed=tuple(MediaParameters.__annotations__))
    for name, value in values.items():
        _check_media_parameter(name, f"{field}.{name}", value)
    return MediaParameters(**values)


def _check_media_parameter(name: str, field: str, value: object) -> None:
    if name in _MAX_INTEGERS:
        if type(value) is not int:
            wrong_type(field, "an integer", value)
        if not 1 <= value <= _MAX_INTEGERS[name]:
            raise InvalidArgument(field, f"expected 1 to {_MAX_INTEGERS[name]}, got {value}")
    elif name == "video_fps":
        if type(value) is not int and type(value) is not float:
            wrong_type(field, "a number", value)
        if not 0 < value <= MAX_VIDEO_FPS:  # JSON's NaN is in no range
            raise InvalidArgument(field, f"expected more than 0 and at most {MAX_VIDEO_FPS}, got {value}")
    elif type(value) is not bool:
        wrong_type(field, "true or false", value)


class _MessagesParser:
    """Walks the messages and hands out the elements of the ``image``, ``audio`` and ``video`` inputs."""

    def __init__(self, elements: Mapping[str, Sequence[bytes]]) -> None:
        self._elements = elements
        self._num_taken = dict.fromkeys(elements, 0)

    def parse(self, value: object) -> tuple[Message, ...]:
        values = expect_list("messages", value)
        messages = tuple(self._message(f"messages[{i}]", item) for i, item in enumerate(values))
        if messages[-1].role != "user":
            raise InvalidArgument(f"messages[{len(messages) - 1}].role", "the last message must be a user's")
        for name, num_taken in self._num_taken.items():
            if num_taken < len(self._elements[name]):
                raise InvalidArgument(f"{name}[{num_taken}]", f"no {name} part of messages takes it")
        return messages

    def _message(self, field: str, value: object) -> Message:
        item = expect_object(field, value, required=("role", "content"))
        role = expect_string(f"{field}.role", item["role"])
        if role not in ROLES:
            raise InvalidArgument(f"{field}.role", f"expected one of {', '.join(ROLES)}, got {role[:50]!r}")
        content = item["content"]
        if isinstance(content, str):
            parts: tuple[Part, ...] = (TextPart(expect_string(f"{field}.content", content)),)
        elif isinstance(content, list):
            content = expect_list(f"{field}.content", content)
            parts = tuple(self._part(f"{field}.content[{i}]", part) for i, part in enumerate(content))
        else:
            wrong_type(f"{field}.content", "a string or a list of parts", content)
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
            return TextPart(expect_string(f"{field}.text", _only(field, value, "text")))
        if kind == "image":
            return ImagePart(*self._next_element(field, value, "image"))
        if kind == "audio":
            return AudioPart(*self._next_element(field, value, "audio"))
        if kind == "video":
            return VideoPart(*self._next_element(field, value, "video"))
        if kind == "image_url":
            return _image_url(f"{field}.image_url", _only(field, value, "image_url"))
        if kind == "video_url":
            return VideoPart(*_data_uri(f"{field}.video_url", _only(field, value, "video_url")))
        if kind == "input_audio":
            return _input_audio(f"{field}.input_audio", _only(field, value, "input_audio"))
        expect_object(field, value, required=("type",), allowed=None)
        known = "text, image, audio, video, image_url, input_audio or video_url"
        raise InvalidArgument(f"{field}.type", f"expected {known}, got {str(kind)[:50]!r}")

    def _next_element(self, field: str, value: object, name: str) -> tuple[str, bytes]:
        expect_object(field, value, required=("type",))
        index = self._num_taken[name]
        self._num_taken[name] += 1
        if index >= len(self._elements[name]):
            raise InvalidArgument(
                field, f"takes {name}[{index}], but the {name} input has {len(self._elements[name])} elements"
            )
        return f"{name}[{index}]", self._elements[name][index]


def _image_url(field: str, value: object) -> ImagePart:
    detail = value.get("detail", "auto") if isinstance(value, dict) else "auto"
    if expect_string(f"{field}.detail", detail) not in IMAGE_DETAILS:
        raise InvalidArgument(f"{field}.detail", f"expected one of {', '.join(IMAGE_DETAILS)}")
    return ImagePart(*_data_uri(field, value, allowed=("detail",)), 1 if detail == "low" else None)


def _data_uri(field: str, value: object, allowed: tuple[str, ...] = ()) -> tuple[str, bytes]:
    url = expect_string(f"{field}.url", expect_object(field, value, ("url",), allowed)["url"])
    if not url[:5].lower() == "data:":
        raise InvalidArgument(
            f"{field}.url", "expected a data URI (data:<type>;base64,<data>); the server fetches nothing"
        )
    return f"{field}.url", url.encode()


def _input_audio(field: str, value: object) -> AudioPart:
    item = expect_object(field, value, required=("data",), allowed=("format",))
    if "format" in item and expect_string(f"{field}.format", item["format"]) not in AUDIO_FORMATS:
        raise InvalidArgument(f"{field}.format", f"expected one of {', '.join(AUDIO_FORMATS)}")
    return AudioPart(f"{field}.data", expect_string(f"{field}.data", item["data"]).encode())


def _only(field: str, value: object, key: str) -> object:
    """The value beside ``type`` of a part that has just these two keys."""
    return expect_object(field, value, required=("type", key))[key]
