"""The one tree of errors a chat can raise, and the one place that reads a server's error.

Messages are the server's own text without Triton's prefix for ensembles, or say what the client found
wrong before anything was sent.
"""

from __future__ import annotations

import re


class MiniCPMOClientError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequest(MiniCPMOClientError):
    """The request is wrong (INVALID_ARG); the message names the field. Repeating it cannot help."""


class ModelNotFound(MiniCPMOClientError):
    """The server has no model of that name (NOT_FOUND)."""


class ServerUnavailable(MiniCPMOClientError):
    """No server answers at that address, or it cannot serve now (UNAVAILABLE). A retry may help."""


class RequestTimeout(MiniCPMOClientError):
    """The answer was not complete in time (DEADLINE_EXCEEDED)."""


class RequestCancelled(MiniCPMOClientError):
    """The chat was closed before its answer was complete, by this side or by the server (CANCELLED)."""


class ServerError(MiniCPMOClientError):
    """Anything else that went wrong on the server."""


_BY_CODE: dict[str, type[MiniCPMOClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNAVAILABLE": ServerUnavailable,
    "DEADLINE_EXCEEDED": RequestTimeout,
    "CANCELLED": RequestCancelled,
}

# Triton (2.51 and later) reports what it refuses before any model runs inside the stream and without a
# code, whatever the client asks for. These are those texts.
_BY_TEXT: tuple[tuple[re.Pattern[str], type[MiniCPMOClientError]], ...] = (
    (re.compile(r"unknown model: .* is not found"), ModelNotFound),
    (re.compile(r"unknown model: .* has no available versions"), ServerUnavailable),
    (
        re.compile(r"unexpected inference input|unexpected shape for input|expected \d+ inputs"),
        InvalidRequest,
    ),
)

_ENSEMBLE_PREFIX = re.compile(r"(?:in ensemble '[^']*', )+")


def from_server(code: str | None, text: str) -> MiniCPMOClientError:
    """The exception for an error the server (or gRPC) reported.

    ``code`` is a gRPC status name such as ``"INVALID_ARGUMENT"``, or None where none was sent.

    >>> from_server("INVALID_ARGUMENT", "in ensemble 'minicpmo', image[0]: not an image")
    InvalidRequest('image[0]: not an image')
    """
    message = _ENSEMBLE_PREFIX.sub("", text.strip(), count=1) or f"the server gave no message ({code})"
    if code is not None:
        return _BY_CODE.get(code, ServerError)(message)
    for pattern, error in _BY_TEXT:
        if pattern.search(message):
            return error(message)
    return ServerError(message)
