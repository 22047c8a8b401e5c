"""Client of MiniCPM-o 4.5 on Triton Inference Server.

>>> from minicpmo_client import Client, FakeTransport
>>> client = Client(transport=FakeTransport(["Hello", "!"]))  # a real one: Client("localhost:8001")
>>> client.chat("Say hello.", sampling={"max_tokens": 8}, stream=False).text
'Hello!'
"""

from minicpmo_client.client import ChatStream, Client
from minicpmo_client.errors import (
    InvalidRequest,
    MiniCPMOClientError,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from minicpmo_client.transport import Call, FakeTransport, Transport
from minicpmo_client.wire import Chat, Chunk, Request, Response

__all__ = [
    "Call",
    "Chat",
    "ChatStream",
    "Chunk",
    "Client",
    "FakeTransport",
    "InvalidRequest",
    "MiniCPMOClientError",
    "ModelNotFound",
    "Request",
    "RequestCancelled",
    "RequestTimeout",
    "Response",
    "ServerError",
    "ServerUnavailable",
    "Transport",
]
