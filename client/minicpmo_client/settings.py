"""What both clients are told when they are made, checked once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from minicpmo_client import address
from minicpmo_client.errors import InvalidRequest, RequestTimeout
from minicpmo_client.fetch import fetch_url
from minicpmo_client.media import Fetch

DEFAULT_URL = "localhost:8001"
DEFAULT_HTTP_URL = "http://localhost:8000"
DEFAULT_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 10.0
POLL_S = 0.5


@dataclass(frozen=True)
class Settings:
    """Settings of a client; ``metrics_url`` is empty where it follows from ``url``."""

    url: str
    model: str
    timeout_s: float | None
    retries: int
    fetch_urls: bool
    metrics_url: str

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise InvalidRequest(f"retries: expected a whole number of at least 0, got {self.retries!r}")

    @property
    def fetch(self) -> Fetch | None:
        """What gets the content of URLs, if anything may."""
        return fetch_url if self.fetch_urls else None

    @property
    def is_http(self) -> bool:
        return address.parse_address(self.url).protocol == "http"

    def where_metrics_are(self) -> str:
        return self.metrics_url or address.metrics_url(address.parse_address(self.url))

    def limit_s(self, timeout_s: float | None) -> float | None:
        """The limit of one call that may have its own."""
        check_timeout(timeout_s)
        return self.timeout_s if timeout_s is None else timeout_s


class Deadline:
    """Seconds that are left of a limit (None: no limit)."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._started_s = time.monotonic()

    def remaining_s(self) -> float | None:
        """Never below a millisecond: the transport then reports the timeout in its own words."""
        if self._limit_s is None:
            return None
        return max(round(self._limit_s - (time.monotonic() - self._started_s), 3), 0.001)

    def next_delay_s(self, delays_s: Iterator[float]) -> float | None:
        """The next of the delays before retries; None where there is none, or no time for it."""
        delay_s, remaining_s = next(delays_s, None), self.remaining_s()
        if delay_s is None or (remaining_s is not None and remaining_s <= delay_s):
            return None
        return delay_s


def readiness_polls(model: str, url: str, timeout_s: float) -> Iterator[tuple[float, float]]:
    """How long to wait for each answer whether ``model`` is ready, and how long after it.

    Raises:
        RequestTimeout: ``timeout_s`` is over.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining_s := deadline - time.monotonic()) > POLL_S:
        yield min(remaining_s, READY_TIMEOUT_S), POLL_S
    yield POLL_S, 0.0
    raise RequestTimeout(f"model {model} at {url} was not ready within {timeout_s:g} s")


def check_timeout(timeout_s: float | None) -> None:
    """:class:`InvalidRequest` unless ``timeout_s`` is above 0 or None."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequest(f"timeout_s: expected seconds above 0 or None, got {timeout_s!r}")
