"""Checks of a client's JSON. Each refusal is an :class:`InvalidArgument` with the place as its field."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from minicpmo_triton.errors import InvalidArgument


def expect_object(
    field: str, value: object, required: tuple[str, ...] = (), allowed: tuple[str, ...] | None = ()
) -> dict[str, Any]:
    """An object with all of ``required``, and of other keys only ``allowed`` (None: any)."""
    if not isinstance(value, dict):
        wrong_type(field, "an object", value)
    for key in required:
        if key not in value:
            raise InvalidArgument(f"{field}.{key}", "is missing")
    known = None if allowed is None else required + allowed
    for key in value:
        if known is not None and key not in known:
            raise InvalidArgument(f"{field}.{key[:50]}", f"is unknown; known are {', '.join(known)}")
    return value


def expect_list(field: str, value: object) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list):
        wrong_type(field, "a list", value)
    if not value:
        raise InvalidArgument(field, "is empty")
    return value


def expect_string(field: str, value: object) -> str:
    """A string that UTF-8 can hold."""
    if not isinstance(value, str):
        wrong_type(field, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON's \ud800 escapes can spell half a character
        raise InvalidArgument(field, "holds a lone surrogate, which is no character") from None
    return value


def wrong_type(field: str, expected: str, value: object) -> NoReturn:
    """Refuse ``value`` by the JSON name of its type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    raise InvalidArgument(field, f"expected {expected}, got {names.get(type(value), 'a number')}")


def decode_utf8(field: str, data: bytes) -> str:
    """The text of ``data``."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"is not valid UTF-8 at byte {error.start}") from None


def load_json(field: str, data: bytes) -> object:
    """The value that ``data`` spells."""
    try:
        value: object = json.loads(decode_utf8(field, data))
    except json.JSONDecodeError as error:
        raise InvalidArgument(field, f"is not valid JSON: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or nesting as deep
        raise InvalidArgument(field, "is not acceptable JSON: a number or the nesting is too large") from None
    return value
