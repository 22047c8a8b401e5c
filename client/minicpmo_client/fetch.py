"""Fetching what a URL in a request names; only clients that were asked to do so come here."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from minicpmo_client.errors import InvalidRequest

FETCH_TIMEOUT_S = 30.0
MAX_FETCHED_BYTES = 512 * 2**20


def fetch_url(url: str, field: str) -> bytes:
    """The content at an ``http(s)`` URL, redirects followed, at most 512 MiB.

    Raises:
        InvalidRequest: it cannot be fetched or is too large; the message names ``field`` and the URL.
    """
    where = f"{field}: cannot fetch {url[:200]!r}"
    try:
        with _opener().open(url, timeout=FETCH_TIMEOUT_S) as answer:
            content: bytes = answer.read(MAX_FETCHED_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise InvalidRequest(f"{where}: HTTP status {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidRequest(f"{where}: {getattr(reason, 'strerror', None) or reason}") from None
    if len(content) > MAX_FETCHED_BYTES:
        raise InvalidRequest(f"{where}: more than {MAX_FETCHED_BYTES // 2**20} MiB")
    return content


def _opener() -> urllib.request.OpenerDirector:
    # urllib's own opener would also follow a redirect to ftp://.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
