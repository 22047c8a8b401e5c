"""Where a server is, and which protocol an address stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from minicpmo_client.errors import InvalidRequest

METRICS_PORT = 8002
_HTTP_PORTS = {"http": 8000, "https": 443}
_EXPECTED = "expected host:port, such as localhost:8001, for gRPC or http://host:port for HTTP"


@dataclass(frozen=True)
class Address:
    """``host`` and ``port`` of a server; ``target`` is what gRPC takes; ``path`` precedes HTTP's ``/v2``."""

    protocol: Literal["grpc", "http"]
    host: str
    port: int
    tls: bool = False
    path: str = ""
    target: str = ""

    @property
    def netloc(self) -> str:
        """``host:port`` as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Parse a server's address: ``host:port`` and ``grpc(s)://`` are gRPC, ``http(s)://`` is HTTP.

    >>> parse_address("http://localhost:8000").protocol, parse_address("grpc://localhost:8001").target
    ('http', 'localhost:8001')

    Raises:
        InvalidRequest: it is none of these.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "grpc", url
    scheme = scheme.lower()
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if scheme in ("grpc", "grpcs") and rest and not _has_path(rest):
        # gRPC knows more kinds of target (unix:, ipv6:) than host:port; it gets them as they are.
        return Address("grpc", host or "localhost", port or 0, scheme == "grpcs", target=rest)
    if scheme in _HTTP_PORTS and host and not (parts.query or parts.fragment):
        return Address("http", host, port or _HTTP_PORTS[scheme], scheme == "https", parts.path.rstrip("/"))
    raise InvalidRequest(f"url: {_EXPECTED}; got {url!r}")


def _has_path(target: str) -> bool:
    return "/" in target and not target.startswith("unix:")


def metrics_url(address: Address) -> str:
    """Triton's metrics endpoint on the same host, at its default port."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{METRICS_PORT}/metrics"
