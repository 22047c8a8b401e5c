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
    """No server answers at that address, or it cannot serve now (UNAVAILABLE). A retry may help.

    ``connection_lost``: the connection ended before the answer did; the request may have arrived.
    """

    connection_lost = False


class CannotConnect(ServerUnavailable):
    """No connection came about, so nothing was sent. The only error after which a client retries."""


class RequestTimeout(MiniCPMOClientError):
    """The answer was not complete in time (DEADLINE_EXCEEDED)."""


class RequestCancelled(MiniCPMOClientError):
    """The chat was closed before its answer was complete, by this side or by the server (CANCELLED)."""


class ServerError(MiniCPMOClientError):
    """Anything else that went wrong on the server."""


CHAT_CLOSED = "the chat was closed before its answer was complete"

_BY_CODE: dict[str, type[MiniCPMOClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNAVAILABLE": ServerUnavailable,
    "DEADLINE_EXCEEDED": RequestTimeout,
    "CANCELLED": RequestCancelled,
}

# Triton reports an error of a gRPC stream inside the stream and without its code, and its HTTP `generate`
# and `generate_stream` drop the code too. These are the texts, Triton's own and the models'.
_BY_TEXT: tuple[tuple[re.Pattern[str], type[MiniCPMOClientError]], ...] = (
    (re.compile(r"unknown model: .* is not found"), ModelNotFound),
    (re.compile(r"unknown model: .* has no available versions"), ServerUnavailable),
    (re.compile(r"(?:request|generation) (?:was|is|has been) cancelled", re.IGNORECASE), RequestCancelled),
    (
        re.compile(
            r"engine has stopped|restart the server|start the server again|try again later"
            r"|server is stopping",
            re.IGNORECASE,
        ),
        ServerUnavailable,
    ),
    (
        re.compile(
            r"unexpected inference input|unexpected shape for input|expected \d+ inputs"
            r"|schema can not convert|exceeds the maximum allowed input size"
        ),
        InvalidRequest,
    ),
    # The server's own refusals begin with the field: `image[1]: ...`, `messages[0].role: ...`.
    (
        re.compile(
            r"^(?:text_input|messages|image|audio|video|stream|\w+_parameters|input_ids|exclude_input_in_output"
            r"|(?:image|audio)_(?:embeds|positions)|return_\w+)(?:\[\d+\]|\.\w+)*: "
        ),
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


def lost_connection(where: str, reason: str) -> ServerUnavailable:
    """The connection to ``where`` ended in the middle of an exchange.

    >>> lost_connection("localhost:8000", "Connection reset by peer")
    ServerUnavailable('lost the connection to localhost:8000: Connection reset by peer')
    """
    error = ServerUnavailable(f"lost the connection to {where}: {reason}")
    error.connection_lost = True
    return error


_CODES_BY_HTTP_STATUS = {
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    499: "CANCELLED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def from_http(status: int, text: str, *, keeps_codes: bool) -> MiniCPMOClientError:
    """The exception for an error reply over HTTP.

    ``keeps_codes`` is true for ``infer``, where status 400 means INVALID_ARG, or CANCELLED, as the text says.
    ``generate`` and ``generate_stream`` (2.51) answer 400, or 200, to every error; the text decides.

    >>> from_http(400, "image[0]: not an image", keeps_codes=False)
    InvalidRequest('image[0]: not an image')
    """
    error = from_server(_CODES_BY_HTTP_STATUS.get(status), text or f"HTTP status {status}")
    if status == 400 and keeps_codes and type(error) is ServerError:
        return InvalidRequest(str(error))
    return error
