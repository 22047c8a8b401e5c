"""Client and ChatStream over the fake transport: streaming, cancelling, errors, readiness."""

from __future__ import annotations

import gc
import itertools
import time

import pytest

from minicpmo_client import (
    Chat,
    Chunk,
    Client,
    FakeTransport,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    Response,
    ServerError,
    ServerUnavailable,
)

WORDS = ["one ", "two ", "three"]


def client_with(*replies: object, **options: bool) -> tuple[Client, FakeTransport]:
    fake = FakeTransport(replies, **options)  # type: ignore[arg-type]
    return Client(transport=fake), fake


def test_chunks_come_in_order_and_a_complete_answer_is_not_cancelled() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count")
    assert [chunk.text for chunk in stream] == WORDS
    assert list(stream) == []
    stream.close()
    del stream
    gc.collect()
    assert fake.cancelled == []


def test_a_final_response_may_carry_the_last_increment() -> None:
    last = Response({"text_output": [b"end"], "finish_reason": [b"stop"]}, final=True)
    client, fake = client_with("the ", last, final=False)
    assert list(client.chat("x")) == [Chunk("the ", num_output_tokens=1), Chunk("end", "stop")]
    assert fake.cancelled == []


def test_without_streaming_the_whole_answer_comes() -> None:
    client, fake = client_with(*WORDS)
    assert client.chat("Count", stream=False) == Chat("one two three", num_output_tokens=3)
    assert fake.requests[0].inputs["stream"] is False


def test_what_is_sent() -> None:
    client, fake = client_with("x")
    client.chat("a", request_id="mine", sampling={"seed": 1}, stream=False, timeout_s=3.0)
    client.chat("b", stream=False)
    first, second = fake.requests
    assert (first.model, first.request_id) == ("minicpmo", "mine")
    assert first.inputs["sampling_parameters"] == [b'{"seed": 1}']
    assert len(second.request_id) == 32
    assert fake.timeouts_s == [3.0, 600.0]


def test_breaking_out_cancels_although_the_stream_is_kept() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count", request_id="r")
    for _ in stream:
        break
    assert fake.cancelled == ["r"]
    with pytest.raises(RequestCancelled):
        next(stream)


def test_an_exception_in_the_loop_cancels() -> None:
    client, fake = client_with(*WORDS)
    with pytest.raises(ZeroDivisionError):
        sum(1 / (len(chunk.text) - 4) for chunk in client.chat("Count"))
    assert len(fake.cancelled) == 1


def test_leaving_the_block_cancels() -> None:
    client, fake = client_with(*WORDS)
    with client.chat("Count") as stream:
        assert next(stream).text == "one "
    assert fake.cancelled == [stream.request_id]


def test_garbage_collection_cancels() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count", request_id="dropped")
    next(stream)
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]
    del stream, cycle
    gc.collect()
    assert fake.cancelled == ["dropped"]


def test_next_and_a_loop_share_one_answer() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count")
    assert next(stream).text == "one "
    assert stream.read().text == "two three"
    with pytest.raises(StopIteration):
        next(stream)
    assert [chunk.text for chunk in itertools.islice(client.chat("Count"), 2)] == WORDS[:2]
    assert len(fake.cancelled) == 1


def test_an_error_ends_the_answer_after_what_came_before_it() -> None:
    client, fake = client_with("one ", ServerError("out of luck"))
    stream = client.chat("Count")
    assert next(stream).text == "one "
    with pytest.raises(ServerError, match="out of luck"):
        next(stream)
    assert list(stream) == []
    assert fake.cancelled == []


def test_an_answer_cut_short_is_an_error() -> None:
    client, _ = client_with("one ", final=False)
    with pytest.raises(ServerError, match="before the final response"):
        client.chat("Count", stream=False)


def test_a_loss_after_the_final_response_costs_nothing() -> None:
    last = Response({"text_output": [b"all"]}, final=True)
    client, _ = client_with(last, ServerUnavailable("gone"), final=False)
    assert client.chat("x", stream=False).text == "all"


def test_an_unreadable_response_is_an_error_also_when_it_is_the_last() -> None:
    broken = Response({"text_output": [b"x"], "logprobs": [b"{"]}, final=True)
    client, _ = client_with(broken, final=False)
    with pytest.raises(ServerError, match="not JSON"):
        client.chat("x", stream=False)


def test_a_wrong_request_fails_at_once_and_sends_nothing() -> None:
    client, fake = client_with("x")
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].image"):
        client.chat("x", images=["gone.png"])
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            client.chat("x", timeout_s=timeout_s)
    assert fake.requests == []


def test_readiness() -> None:
    class Starting(FakeTransport):
        answers = iter([ServerUnavailable("no"), False, True])

        def model_ready(self, model: str, timeout_s: float) -> bool:
            answer = next(self.answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    Client(transport=Starting()).wait_until_ready(30.0)
    started_s = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"minicpmo at localhost:8001 was not ready within 0.1 s"):
        Client(transport=FakeTransport(ready=False)).wait_until_ready(0.1)
    assert time.monotonic() - started_s < 5


def test_closing_the_client_closes_its_transport() -> None:
    fake = FakeTransport()
    with Client(transport=fake):
        assert not fake.closed
    assert fake.closed
