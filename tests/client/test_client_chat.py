"""Client and ChatStream over the fake transport: streaming, cancelling, errors, readiness."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from minicpmo_client import (
    AsyncClient,
    AsyncFakeTransport,
    CannotConnect,
    Chat,
    Chunk,
    Client,
    Embeddings,
    FakeTransport,
    InvalidRequest,
    MiniCPMOClientError,
    RequestCancelled,
    RequestTimeout,
    Response,
    ServerError,
    ServerUnavailable,
)
from minicpmo_client.errors import lost_connection

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
    with pytest.raises(InvalidRequest, match="request_id: expected a string, got int"):
        client.chat("x", request_id=5)  # type: ignore[call-overload]
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


def test_giving_up_tells_the_engine_once() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count", request_id="r")
    next(stream)
    stream.close()
    stream.close()
    del stream
    gc.collect()
    (notice,) = fake.notices
    assert (notice.model, notice.inputs) == ("llm", {"cancel_request_id": [b"r"]})


def test_a_generation_that_has_ended_is_not_reported() -> None:
    client, fake = client_with({"text_output": [b"all"], "finish_reason": [b"stop"]}, "never read")
    for _ in client.chat("Count"):
        break
    assert len(fake.cancelled) == 1
    assert fake.notices == []


def test_a_chat_with_the_engine_itself_is_reported_too() -> None:
    fake = FakeTransport(WORDS)
    for _ in Client(model="llm", transport=fake).chat("Count", request_id="r"):
        break
    assert fake.cancelled == ["r"]
    assert [notice.inputs for notice in fake.notices] == [{"cancel_request_id": [b"r"]}]


@pytest.mark.parametrize(
    ("reply", "is_reported"),
    [
        (RequestTimeout("late"), True),
        (lost_connection("h:1", "reset"), True),
        ({"text_output": [b"x"], "logprobs": [b"{"]}, True),
        (ServerUnavailable("the engine has stopped"), False),
        (ServerError("out of luck"), False),
        (InvalidRequest("image[0]: no image"), False),
    ],
    ids=["timeout", "lost", "unreadable", "unavailable", "error", "refused"],
)
def test_the_engine_is_told_where_it_may_go_on(reply: Any, is_reported: bool) -> None:
    client, fake = client_with("one ", reply)
    with pytest.raises(MiniCPMOClientError):
        client.chat("Count", request_id="r", stream=False)
    assert [notice.inputs["cancel_request_id"] for notice in fake.notices] == [[b"r"]] * is_reported
    assert fake.cancelled == ["r"] * is_reported

    async def ask() -> None:
        await AsyncClient(transport=async_fake).chat("Count", request_id="r", stream=False)

    async_fake = AsyncFakeTransport(["one ", reply])
    with pytest.raises(MiniCPMOClientError):
        asyncio.run(ask())
    assert [notice.inputs["cancel_request_id"] for notice in async_fake.notices] == [[b"r"]] * is_reported
    assert async_fake.cancelled == ["r"] * is_reported


def test_an_interruption_while_sending_is_reported() -> None:
    class Interrupted(FakeTransport):
        def start(self, request: Any, timeout_s: float | None) -> Any:
            super().start(request, timeout_s)
            raise KeyboardInterrupt

    fake = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Client(transport=fake).chat("Count", request_id="r")
    assert [notice.inputs for notice in fake.notices] == [{"cancel_request_id": [b"r"]}]


def test_closing_the_client_reports_its_chats() -> None:
    client, fake = client_with(*WORDS)
    stream = client.chat("Count", request_id="open")
    next(stream)
    client.close()
    assert fake.cancelled == ["open"]
    assert len(fake.notices) == 1


class Refusing(FakeTransport):
    """Cannot connect ``num_refusals`` times."""

    num_refusals = 0

    def start(self, request: Any, timeout_s: float | None) -> Any:
        self.num_refusals -= 1
        call = super().start(request, timeout_s)
        if self.num_refusals >= 0:
            return FakeTransport([CannotConnect("nobody")], final=False).start(request, timeout_s)
        return call


def refusing(num_refusals: int) -> Refusing:
    fake = Refusing(["late"])
    fake.num_refusals = num_refusals
    return fake


def test_retries_only_where_nothing_was_sent() -> None:
    fake = refusing(2)
    assert Client(transport=fake, retries=2).chat("x", stream=False).text == "late"
    assert len(fake.requests) == 3
    assert fake.requests[0] == fake.requests[2]
    for options in ({}, {"retries": 1}, {"retries": 9, "timeout_s": 0.3}):
        with pytest.raises(CannotConnect, match="nobody"):
            Client(transport=refusing(99), **options).chat("x", stream=False)
    fake = FakeTransport([ServerUnavailable("restarting")], final=False)
    with pytest.raises(ServerUnavailable, match="restarting"):
        Client(transport=fake, retries=5).chat("x", stream=False)
    assert len(fake.requests) == 1


def test_closing_ends_the_wait_before_a_retry() -> None:
    stream = Client(transport=refusing(99), retries=99).chat("x")
    timer = threading.Timer(0.3, stream.close)
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(RequestCancelled):
        stream.read()
    assert time.monotonic() - started_s < 0.6
    timer.join()


@pytest.mark.parametrize("retries", [-1, 1.5, True, None])
def test_retries_are_a_whole_number(retries: Any) -> None:
    with pytest.raises(InvalidRequest, match="retries: expected a whole number of at least 0"):
        Client(transport=FakeTransport(), retries=retries)


def test_embeddings_of_each_item_and_errors_by_its_name() -> None:
    rows = np.ones((3, 2), np.float32)
    fake = FakeTransport(tensors={"image_embeds": rows, "audio_embeds": rows[:1]})
    client = Client(transport=fake)
    found = client.embed(images=[b"a", b"b"], audio=[b"c"], media_parameters={"max_slice_nums": 1})
    assert [array.shape for array in (*found.images, *found.audio)] == [(3, 2), (3, 2), (1, 2)]
    sent = sorted(fake.requests, key=lambda request: str(sorted(request.inputs)))
    assert {request.model for request in sent} == {"encode"}
    assert [request.inputs.get("audio") for request in sent].count([b"c"]) == 1
    assert all(request.inputs["media_parameters"] == [b'{"max_slice_nums": 1}'] for request in sent)
    assert client.embed() == Embeddings()
    with pytest.raises(InvalidRequest, match=r"^audio\[1\]: is empty"):
        client.embed(audio=[b"x", b""])
    fake.tensors = InvalidRequest("audio[0]: too short")
    with pytest.raises(InvalidRequest, match=r"^audio\[0\]: too short"):
        client.embed(audio=[b"x"])
    fake.tensors = {}
    with pytest.raises(ServerError, match=r"^images\[0\]: the server sent no image_embeds"):
        client.embed(images=[b"x"])


def test_a_fake_gives_chunks_as_they_are() -> None:
    chunks = [Chunk("", reasoning="hm"), Chunk("größer", "stop", 3, 2, -0.5, [{"7": None}], "so")]
    client, _ = client_with(*chunks)
    assert list(client.chat("x")) == chunks
    assert client.chat("x", stream=False).reasoning == "hmso"
