"""The small parts: addresses, tensors, events, the courier, fetching."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpmo_client import Client, FakeTransport, InvalidRequest, ServerError, fetch
from minicpmo_client.address import Address, parse_address
from minicpmo_client.courier import Courier
from minicpmo_client.http_wire import http_address
from minicpmo_client.sse import EventParser
from minicpmo_client.tensors import decode_tensor, encode_input


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("h:8001", Address("grpc", "h", 8001, target="h:8001")),
        ("GRPC://h:1", Address("grpc", "h", 1, target="h:1")),
        ("grpcs://h:1", Address("grpc", "h", 1, tls=True, target="h:1")),
        ("[::1]:8001", Address("grpc", "::1", 8001, target="[::1]:8001")),
        ("http://h:5", Address("http", "h", 5)),
        ("http://h/", Address("http", "h", 8000)),
        ("https://h/triton/", Address("http", "h", 443, tls=True, path="/triton")),
        ("http://[::1]:5", Address("http", "::1", 5)),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://h:1", "grpc://", "h:1/path", "http://h:1?q", "http://h:x", "http://h:99999"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url: expected host:port, such as localhost:8001"):
        parse_address(url)


def test_an_http_transport_wants_an_http_address() -> None:
    with pytest.raises(InvalidRequest, match="url: expected http://host:port"):
        http_address("h:8001")


def test_the_netloc_of_an_ipv6_address() -> None:
    assert parse_address("http://[::1]:5").netloc == "[::1]:5"


def test_bf16_becomes_the_float32_of_the_same_value() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([[0.0, -1.5, 3.1415926], [float("inf"), 1e-40, -65504.0]], dtype=torch.bfloat16)
    raw = values.view(torch.uint16).numpy().tobytes()
    np.testing.assert_array_equal(decode_tensor("BF16", [2, 3], raw), values.float().numpy())


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_bytes_there_and_back(items: list[bytes]) -> None:
    shape, raw = encode_input(items)
    decoded = decode_tensor("BYTES", shape, raw)
    assert decoded.shape == (len(items),)
    assert decoded.tolist() == items


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("FP32", [2], b"\0" * 4),
        ("FP32", [1], b"\0" * 3),
        ("BYTES", [1], b"\x05\0\0\0abc"),
        ("BYTES", [1], b"\x05\0"),
        ("BYTES", [2], b"\x01\0\0\0a"),
        ("NEW", [1], b"\0"),
    ],
)
def test_bytes_that_do_not_fit(datatype: str, shape: list[int], raw: bytes) -> None:
    with pytest.raises(ServerError, match=rf"{len(raw)} bytes as a tensor of {datatype}"):
        decode_tensor(datatype, shape, raw)


@given(
    st.lists(st.binary(min_size=1, max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b)),
    st.data(),
)
def test_events_however_they_are_cut(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(
        b"data: " + event + data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for event in events
    )
    parser, found = EventParser(), []
    while stream:
        at = data.draw(st.integers(1, len(stream)))
        found += parser.feed(stream[:at])
        stream = stream[at:]
    assert found == events


def test_a_courier_works_in_order_and_drops_what_fails() -> None:
    courier, done = Courier(), []
    courier.start()
    courier.start()
    courier.post(lambda: done.append(1))
    courier.post(lambda: 1 / 0)
    courier.post(lambda: done.append(2))
    assert courier.drain()
    assert done == [1, 2]


def test_a_courier_does_not_wait_for_ever() -> None:
    courier, release = Courier(), threading.Event()
    courier.start()
    courier.post(release.wait)
    started_s = time.monotonic()
    assert not courier.drain(0.1)
    assert time.monotonic() - started_s < 1
    release.set()
    assert courier.drain()


def test_a_couriers_thread_ends_with_it() -> None:
    courier = Courier()
    courier.start()
    thread = courier._thread
    assert thread is not None
    del courier
    thread.join(5)
    assert not thread.is_alive()


class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, where = {"/gone": (404, ""), "/moved": (302, "/file"), "/ftp": (302, "ftp://h/x")}.get(
            self.path, (200, "")
        )
        self.send_response(status)
        if where:
            self.send_header("Location", where)
        self.end_headers()
        self.wfile.write(b"content" if status == 200 else b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_client_fetches_urls_when_asked_to(site: str) -> None:
    fake = FakeTransport(["x"])
    client = Client(transport=fake, fetch_urls=True)
    client.chat("x", images=[f"{site}/file"], videos=[f"{site}/moved"], stream=False)
    assert (fake.requests[0].inputs["image"], fake.requests[0].inputs["video"]) == (
        [b"content"],
        [b"content"],
    )
    with pytest.raises(InvalidRequest, match=r"images\[0\]: is a URL; .* fetch_urls=True"):
        Client(transport=fake).embed(images=[f"{site}/file"])


@pytest.mark.parametrize(
    ("path", "problem"), [("/gone", "HTTP status 404"), ("/ftp", "HTTP status 302"), ("/ /", "")]
)
def test_what_cannot_be_fetched(site: str, path: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^here: cannot fetch '{site}{path}': .*{problem}"):
        fetch.fetch_url(f"{site}{path}", "here")


def test_nothing_is_fetched_beyond_the_limit(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHED_BYTES", 3)
    with pytest.raises(InvalidRequest, match="more than 0 MiB"):
        fetch.fetch_url(f"{site}/file", "here")
    with pytest.raises(InvalidRequest, match=r"cannot fetch 'http://127\.0\.0\.1:9/': Connection refused"):
        fetch.fetch_url("http://127.0.0.1:9/", "here")
