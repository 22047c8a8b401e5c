"""Messages as callers write them -> messages as the server reads them, and the media tensors beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minicpmo_client.errors import InvalidRequest
from minicpmo_client.media import Fetch, audio_bytes, image_bytes, is_url, video_bytes

#: A user turn as plain text, or messages in OpenAI's form.
Messages = str | Sequence[Mapping[str, Any]]

#: Kind of part, and name of the tensor that carries it -> how its value becomes bytes.
ENCODERS = {"image": image_bytes, "audio": audio_bytes, "video": video_bytes}


def as_turns(
    messages: Messages,
    images: Iterable[object] = (),
    audio: Iterable[object] = (),
    videos: Iterable[object] = (),
) -> Sequence[Any]:
    """One user turn, media before its text, for a plain question; messages as they are."""
    parts = [*_parts("image", images, "images"), *_parts("audio", audio, "audio")]
    parts += _parts("video", videos, "videos")
    if isinstance(messages, str):
        content = [*parts, {"type": "text", "text": messages}] if parts else messages
        return [{"role": "user", "content": content}]
    if parts:
        raise InvalidRequest(
            "images, audio and videos go with a plain question; in messages they are content parts"
        )
    if isinstance(messages, bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages: expected text or a list of messages, got {type(messages).__name__}")
    return messages


def take_media(
    messages: Sequence[Any], fetch: Fetch | None = None
) -> tuple[list[Any], dict[str, list[bytes]]]:
    """Messages whose media parts are bare placeholders, and what those held, in order.

    ``fetch`` gets URLs; without it they are refused. The caller's messages stay as they are.
    """
    media: dict[str, list[bytes]] = {kind: [] for kind in ENCODERS}
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where}: expected an object, got {type(message).__name__}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [
                _take_part(part, media, f"{where}.content[{i}]", fetch) for i, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        turns.append(dict(message))
    return turns, media


def json_object(value: object, field: str) -> bytes:
    """A mapping as JSON."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field}: expected a mapping, got {type(value).__name__}")
    return json_bytes(dict(value), field)


def json_bytes(value: object, field: str) -> bytes:
    """JSON in UTF-8; :class:`InvalidRequest` names ``field`` where ``value`` has no JSON form."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: cannot be written as JSON: {error}") from None


def _parts(kind: str, items: Iterable[object], field: str) -> list[dict[str, object]]:
    return [{"type": kind, kind: item} for item in as_list(items, field)]


def as_list(items: Iterable[object], field: str) -> Sequence[object]:
    """``items`` if it is a list or a tuple."""
    # A lone path or picture is the likeliest slip, and iterating over it would give nonsense.
    if not isinstance(items, list | tuple):
        raise InvalidRequest(f"{field}: expected a list, got {type(items).__name__}")
    return items


def _take_part(part: object, media: Mapping[str, list[bytes]], where: str, fetch: Fetch | None) -> object:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where}: expected an object with a type, got {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str):
        return dict(part)
    if kind.endswith("_url") and kind[:-4] in media:
        return _take_url_part(part, kind, media, where, fetch)
    if kind not in media:
        return dict(part)
    if kind not in part:
        raise InvalidRequest(f"{where}.{kind}: is missing; give a path, bytes or an array")
    media[kind].append(ENCODERS[kind](part[kind], f"{where}.{kind}", fetch))
    return {key: value for key, value in part.items() if key != kind}


def _take_url_part(
    part: Mapping[str, Any], kind: str, media: Mapping[str, list[bytes]], where: str, fetch: Fetch | None
) -> object:
    """An ``image_url`` part: a data URI goes to the server as it is, another URL's content as a tensor."""
    holder = part.get(kind)
    url = holder.get("url") if isinstance(holder, Mapping) else holder
    if not is_url(url):
        return dict(part)
    name = kind[:-4]
    media[name].append(ENCODERS[name](url, f"{where}.{kind}", fetch))
    return {"type": name}
