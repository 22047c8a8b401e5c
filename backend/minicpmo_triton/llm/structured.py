"""``structured_outputs`` of the sampling parameters: the constraint that an answer follows.

vLLM's classes take any type and some backends fail late on a wrong one, so the types are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from minicpmo_triton.errors import InvalidArgument

#: How the constraints were called before vLLM 0.11; its ``backend`` is the operator's choice by now.
OLD_NAME = "guided_decoding"
NAME = "structured_outputs"

_OLD_BACKENDS = ("auto", "xgrammar", "xgrammar:no-fallback", "xgrammar:_auto")

_Accepts = tuple[str, Callable[[Any], bool]]
_TEXT: _Accepts = ("a string", lambda value: isinstance(value, str))
_FLAG: _Accepts = ("true or false", lambda value: isinstance(value, bool))
_CHOICES: _Accepts = (
    "a list of at least one string, none empty",
    lambda value: (
        isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)
    ),
)

_KEYS: dict[str, _Accepts] = {
    "json": ("a JSON schema (an object, or its text)", lambda value: isinstance(value, (dict, str))),
    "regex": _TEXT,
    "choice": _CHOICES,
    "grammar": _TEXT,
    "json_object": ("true", lambda value: value is True),
    "structural_tag": _TEXT,
    "disable_any_whitespace": _FLAG,
    "disable_additional_properties": _FLAG,
    "whitespace_pattern": _TEXT,
}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def rename_old(given: dict[str, Any], field: str) -> None:
    """Take ``guided_decoding`` for ``structured_outputs``, in place; not both at once."""
    if given.get(OLD_NAME) is None:
        given.pop(OLD_NAME, None)
        return
    value = as_object(given.pop(OLD_NAME), f"{field}.{OLD_NAME}")
    if given.get(NAME) is not None:
        raise InvalidArgument(f"{field}.{OLD_NAME}", f"is an older name of {NAME}; send one of them")
    backend = value.pop("backend", None)
    if backend is not None and backend not in _OLD_BACKENDS:
        raise InvalidArgument(
            f"{field}.{OLD_NAME}.backend", "cannot be set by a request: it is an engine argument"
        )
    given[NAME] = value


def schema_to_text(value: dict[str, Any]) -> None:
    """Make a constraint's JSON schema text, in place: a deep object does not survive vLLM's copying."""
    if isinstance(value.get("json"), dict):
        value["json"] = json.dumps(value["json"])


def as_object(value: Any, field: str) -> dict[str, Any]:
    """A JSON object, given as itself or as its text (as Triton's vLLM backend takes it)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidArgument(field, "expected an object, got text that is no JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"expected an object, got {json.dumps(value)[:60]}")
    return dict(value)


def check_constraint(value: Mapping[str, Any], field: str) -> None:
    """Raise :class:`InvalidArgument` naming the key unless there is exactly one constraint, well typed."""
    for key, item in value.items():
        if key not in _KEYS:
            raise InvalidArgument(f"{field}.{key}", f"unknown key; known are {', '.join(_KEYS)}")
        expected, accepts = _KEYS[key]
        if not accepts(item):
            raise InvalidArgument(f"{field}.{key}", f"expected {expected}, got {json.dumps(item)[:60]}")
    constraints = [key for key in _CONSTRAINTS if key in value]
    if len(constraints) != 1:
        raise InvalidArgument(
            field, f"needs exactly one of {', '.join(_CONSTRAINTS)}, got {', '.join(constraints) or 'none'}"
        )
