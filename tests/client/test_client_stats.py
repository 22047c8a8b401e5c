"""The graph counters of a metrics endpoint: parsed, fetched, printed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_http import TritonHttp, serving

from minicpmo_client import AsyncClient, CannotConnect, Client, InvalidRequest, ServerError, Stats, stats
from minicpmo_client.cli import main
from minicpmo_client.stats import parse_metrics

LABELS = 'device="cuda:0",instance="vision_encoder_0",model="vision_encoder"'
AUDIO = 'device="cuda:0",instance="audio_encoder_0",model="audio_encoder"'
TEXT = f"""\
# HELP minicpmo_encoder_graph_hits_total Encoder calls answered by replaying a graph
# TYPE minicpmo_encoder_graph_hits_total counter
minicpmo_encoder_graph_hits_total{{{LABELS}}} 30.000000
minicpmo_encoder_graph_misses_total{{{LABELS},reason="warmup"}} 8
minicpmo_encoder_graph_misses_total{{{LABELS},reason="capacity"}} 2 1700000000000
minicpmo_encoder_graphs{{{LABELS}}} 4
minicpmo_encoder_graph_capture_failures{{{LABELS}}} 0
minicpmo_encoder_graph_static_bytes{{{LABELS}}} 1.5e6
minicpmo_encoder_graph_pool_bytes{{{LABELS}}} 3000000
minicpmo_encoder_items_total{{{LABELS}}} 77
minicpmo_encoder_graph_hits_total{{{AUDIO}}} 0
minicpmo_encoder_graph_capture_failures{{{AUDIO}}} 1
minicpmo_encoder_graph_captures_seconds_bucket{{{LABELS},le="+Inf"}} 4
nv_inference_count{{model="a \\"b\\" \\\\ {{c}}\\nd",version="1"}} 5
odd_gauge NaN
not a sample at all {{
"""


def test_a_snapshot() -> None:
    found = parse_metrics(TEXT)
    audio, vision = found.encoders
    assert (vision.model, vision.instance, vision.device) == ("vision_encoder", "vision_encoder_0", "cuda:0")
    assert vision.graph_misses == {"warmup": 8, "capacity": 2}
    assert (vision.graph_hits, vision.num_misses, vision.hit_rate) == (30, 10, 0.75)
    assert (vision.num_graphs, vision.num_items, vision.capture_failures) == (4, 77, 0)
    assert (vision.static_bytes, vision.pool_bytes) == (1_500_000, 3_000_000)
    assert (audio.hit_rate, audio.capture_failures) == (None, 1)
    assert found.total("nv_inference_count", model='a "b" \\ {c}\nd') == 5
    assert found.total(stats.GRAPH_MISSES, model="vision_encoder") == 10
    assert found.total("nothing") == 0
    assert sum(sample.name == "odd_gauge" for sample in found.samples) == 1
    assert parse_metrics("") == Stats((), ())


def test_the_families_are_those_the_documentation_lists() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for family in stats.FAMILIES:
        assert f"`{family}`" in text


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonHttp]:
    with serving() as server:
        server.metrics = TEXT
        yield server


def test_both_clients_read_the_endpoint(triton: TritonHttp) -> None:
    url = f"{triton.url}/metrics"
    expected = parse_metrics(TEXT).encoders
    assert Client(metrics_url=url).stats().encoders == expected
    assert asyncio.run(AsyncClient(metrics_url=url).stats()).encoders == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gpu7:8001", "http://gpu7:8002/metrics"),
        ("grpc://10.0.0.1:9", "http://10.0.0.1:8002/metrics"),
        ("https://h/triton", "http://h:8002/metrics"),
        ("[::1]:8001", "http://[::1]:8002/metrics"),
    ],
)
def test_where_the_metrics_are(url: str, expected: str) -> None:
    assert Client(url).settings.where_metrics_are() == expected


def test_a_wrong_endpoint(triton: TritonHttp) -> None:
    with pytest.raises(ServerError, match="/other answered with HTTP status 400"):
        Client(metrics_url=f"{triton.url}/other").stats()
    with pytest.raises(InvalidRequest, match="metrics_url: expected http"):
        Client(metrics_url="h:8002").stats()
    with pytest.raises(CannotConnect):
        Client(metrics_url="http://127.0.0.1:9/metrics").stats(timeout_s=1)


def test_the_table(triton: TritonHttp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--metrics-url", f"{triton.url}/metrics"]) == 0
    assert capsys.readouterr().out == (
        "instance          device  hits  misses  hit rate  graphs   static     pool  items\n"
        "audio_encoder_0   cuda:0     0       0         -       0      0 B      0 B      0\n"
        "vision_encoder_0  cuda:0    30      10     75.0%       4  1.4 MiB  2.9 MiB     77\n"
        "audio_encoder_0: A GRAPH CAPTURE HAS FAILED; this instance refuses every call until a restart\n"
        "vision_encoder_0: misses: 8 warmup, 2 capacity\n"
    )


def test_json(triton: TritonHttp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--json", "--metrics-url", f"{triton.url}/metrics"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [encoder["hit_rate"] for encoder in found["encoders"]] == [None, 0.75]
    assert {sample["name"] for sample in found["samples"]} > set(stats.FAMILIES)


def test_before_any_encoder_has_reported(triton: TritonHttp, capsys: pytest.CaptureFixture[str]) -> None:
    triton.metrics = "up 1\n"
    try:
        assert main(["stats", "--metrics-url", f"{triton.url}/metrics"]) == 0
    finally:
        triton.metrics = TEXT
    assert capsys.readouterr().out == "no encoder has reported yet\n"
