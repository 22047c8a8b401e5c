"""Client of MiniCPM-o 4.5 on Triton Inference Server.

>>> from minicpmo_client import Client, FakeTransport
>>> client = Client(transport=FakeTransport(["Hello", "!"]))  # a real one: Client("localhost:8001")
>>> client.chat("Say hello.", sampling={"max_tokens": 8}, stream=False).text
'Hello!'
"""

from minicpmo_client.aio import AsyncClient
from minicpmo_client.aio_stream import AsyncChatStream
from minicpmo_client.chat_stream import ChatStream
from minicpmo_client.client import Client
from minicpmo_client.embeddings import Embeddings
from minicpmo_client.errors import (
    CannotConnect,
    InvalidRequest,
    MiniCPMOClientError,
    ModelNotFound,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
)
from minicpmo_client.fake import AsyncFakeTransport, FakeTransport
from minicpmo_client.stats import EncoderStats, Sample, Stats
from minicpmo_client.transport import AsyncCall, AsyncTransport, Call, Transport
from minicpmo_client.wire import Chat, Chunk, Request, Response

__all__ = [
    "AsyncCall",
    "AsyncChatStream",
    "AsyncClient",
    "AsyncFakeTransport",
    "AsyncTransport",
    "Call",
    "CannotConnect",
    "Chat",
    "ChatStream",
    "Chunk",
    "Client",
    "Embeddings",
    "EncoderStats",
    "FakeTransport",
    "InvalidRequest",
    "MiniCPMOClientError",
    "ModelNotFound",
    "Request",
    "RequestCancelled",
    "RequestTimeout",
    "Response",
    "Sample",
    "ServerError",
    "ServerUnavailable",
    "Stats",
    "Transport",
]
