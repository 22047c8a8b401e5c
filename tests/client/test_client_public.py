"""What the package promises: its public names, its examples, its error tree, what it may import."""

from __future__ import annotations

import doctest
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import minicpmo_client
from minicpmo_client import errors
from minicpmo_client.errors import from_server

MODULES = [f"minicpmo_client.{module.name}" for module in pkgutil.iter_modules(minicpmo_client.__path__)]
WITH_EXAMPLES = {
    "minicpmo_client",
    "minicpmo_client.address",
    "minicpmo_client.aio",
    "minicpmo_client.aio_stream",
    "minicpmo_client.chat_stream",
    "minicpmo_client.client",
    "minicpmo_client.commands",
    "minicpmo_client.embeddings",
    "minicpmo_client.errors",
    "minicpmo_client.fake",
    "minicpmo_client.http_wire",
    "minicpmo_client.sse",
    "minicpmo_client.stats",
    "minicpmo_client.wire",
}


def test_public_names() -> None:
    assert minicpmo_client.__all__ == [
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
    for name in minicpmo_client.__all__:
        assert getattr(minicpmo_client, name).__doc__, name
    assert (Path(minicpmo_client.__path__[0]) / "py.typed").is_file()


@pytest.mark.parametrize("name", ["minicpmo_client", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert (results.attempted > 0) == (name in WITH_EXAMPLES)


def test_the_package_needs_neither_torch_nor_pillow_nor_the_server() -> None:
    code = (
        "import sys, minicpmo_client, minicpmo_client.cli\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'PIL', 'vllm', 'minicpmo_triton'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_every_error_is_of_the_one_tree() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    exceptions = [value for value in classes if issubclass(value, Exception)]
    assert len(exceptions) == 8
    for error in exceptions:
        assert issubclass(error, minicpmo_client.MiniCPMOClientError)
        assert error.__name__ in minicpmo_client.__all__
        assert str(pickle.loads(pickle.dumps(error("text")))) == "text"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", errors.InvalidRequest),
        ("NOT_FOUND", errors.ModelNotFound),
        ("UNAVAILABLE", errors.ServerUnavailable),
        ("DEADLINE_EXCEEDED", errors.RequestTimeout),
        ("CANCELLED", errors.RequestCancelled),
        ("INTERNAL", errors.ServerError),
        ("UNKNOWN", errors.ServerError),
        ("RESOURCE_EXHAUSTED", errors.ServerError),
    ],
)
def test_codes(code: str, error: type[Exception]) -> None:
    raised = from_server(code, "in ensemble 'outer', in ensemble 'minicpmo', image[0]: bad\n")
    assert type(raised) is error
    assert str(raised) == "image[0]: bad"
    assert str(from_server(code, "")) == f"the server gave no message ({code})"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Request for unknown model: 'nope' is not found", errors.ModelNotFound),
        ("Request for unknown model: 'llm' has no available versions", errors.ServerUnavailable),
        ("unexpected inference input 'zzz' for model 'minicpmo'", errors.InvalidRequest),
        ("expected 2 inputs but got 1 inputs for model 'minicpmo'", errors.InvalidRequest),
        ("messages[0].role: expected one of user", errors.InvalidRequest),
        ("in ensemble 'minicpmo', image[1]: not an image", errors.InvalidRequest),
        ("the language model's engine has stopped (x); restart the server", errors.ServerUnavailable),
        ("the request was cancelled", errors.RequestCancelled),
        ("The schema can not convert input 'text_input' to tensor with proper shape", errors.InvalidRequest),
        ("something: else", errors.ServerError),
    ],
)
def test_texts_without_a_code(text: str, error: type[Exception]) -> None:
    raised = from_server(None, text)
    assert type(raised) is error
    assert str(raised) == text.removeprefix("in ensemble 'minicpmo', ")


@pytest.mark.parametrize(
    ("status", "keeps_codes", "error"),
    [
        (400, True, errors.InvalidRequest),
        (400, False, errors.ServerError),
        (404, False, errors.ModelNotFound),
        (499, False, errors.RequestCancelled),
        (500, True, errors.ServerError),
        (503, True, errors.ServerUnavailable),
        (504, False, errors.RequestTimeout),
    ],
)
def test_http_statuses(status: int, keeps_codes: bool, error: type[Exception]) -> None:
    raised = errors.from_http(status, "went wrong", keeps_codes=keeps_codes)
    assert (type(raised), str(raised)) == (error, "went wrong")
    assert str(errors.from_http(status, "", keeps_codes=keeps_codes)) == f"HTTP status {status}"


def test_a_cancelled_infer_is_told_by_its_text() -> None:
    error = errors.from_http(400, "the request was cancelled", keeps_codes=True)
    assert type(error) is errors.RequestCancelled


def test_texts_of_the_servers_own_errors_are_recognised() -> None:
    from minicpmo_triton.errors import InvalidArgument

    for field in ("text_input", "messages[2].content[0].type", "image[1]", "video[0]", "input_ids", "stream"):
        text = str(InvalidArgument(field, "is wrong"))
        assert type(from_server(None, text)) is errors.InvalidRequest, text
