"""vLLM's own manager, driven on the CPU with a stand-in for the two names of torch it captures with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minicpmo_triton.errors import ConfigError
from minicpmo_triton.graphs import manager
from minicpmo_triton.graphs.policy import Inputs, OutputSpec

pytest.importorskip("vllm", reason="vLLM is not installed")

CPU = torch.device("cpu")
POOL = (0, 7)


class RecordedGraph:
    """In place of ``torch.cuda.CUDAGraph``: a replay runs ``work``, which the test sets."""

    def __init__(self) -> None:
        self.pool: object = None
        self.work: Callable[[], None] = lambda: None

    def replay(self) -> None:
        with torch.inference_mode():  # as the manager captured it; a real replay knows no modes
            self.work()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Graphs captured, in order, by whatever manager runs in the test."""
    captured: list[RecordedGraph] = []

    @contextmanager
    def graph(graph: RecordedGraph, pool: object = None, **_: object) -> Iterator[None]:
        graph.pool = pool
        captured.append(graph)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return captured


def affine(inputs: Inputs) -> Tensor:
    """[S, P, 2] rows and a scalar, and a bias or none -> [S, 2]."""
    rows, scale, bias = inputs["rows"], inputs["scale"], inputs["bias"]
    assert rows is not None
    assert scale is not None
    output = rows.sum(1) * scale
    return output if bias is None else output + bias


def example(num_slices: int, value: float, bias: Tensor | None = None) -> dict[str, Tensor | None]:
    rows = torch.arange(num_slices * 6.0).view(num_slices, 3, 2) + value
    return {"rows": rows, "scale": torch.tensor(value), "bias": bias}


def captured(inputs: Inputs, captures: list[RecordedGraph]) -> tuple[manager.ManagedGraph, Inputs, Any]:
    """The managed graph of ``inputs``, its static inputs, and vLLM's record of it."""
    static = {name: t if t is None else t.clone() for name, t in inputs.items()}
    graph = manager.ManagedGraph(affine, static, OutputSpec.of(affine(inputs)), CPU)
    graph.capture(POOL)
    [records] = graph._manager.budget_graphs.values()
    [record] = records.values()
    # The last capture's kernels: the forward over the very buffers that the manager keeps.
    captures[-1].work = lambda: record.output_buffer.copy_(affine({"bias": None, **record.input_buffers}))
    return graph, static, record


@pytest.mark.parametrize("num_slices", [1, 2, 16])
def test_replay_equals_eager(num_slices: int, captures: list[RecordedGraph]) -> None:
    graph, _, _ = captured(example(num_slices, 1.0, torch.ones(2)), captures)
    for value in (2.0, 3.0, -1.5):
        inputs = example(num_slices, value, torch.full((2,), value))
        assert torch.equal(graph.replay(inputs), affine(inputs))


def test_absent_inputs_stay_absent(captures: list[RecordedGraph]) -> None:
    graph, _, record = captured(example(2, 1.0), captures)
    assert sorted(record.input_buffers) == ["rows", "scale"]
    assert torch.equal(graph.replay(example(2, 5.0)), affine(example(2, 5.0)))


def test_one_graph_captured_into_the_given_pool(captures: list[RecordedGraph]) -> None:
    captured(example(2, 1.0), captures)
    assert [graph.pool for graph in captures] == [POOL]


def test_buffers_are_never_rebound(captures: list[RecordedGraph]) -> None:
    graph, static, record = captured(example(2, 1.0), captures)
    output_address = record.output_buffer.data_ptr()
    graph.replay(example(2, 4.0))
    for name, buffer in record.input_buffers.items():
        assert buffer is static[name]
    assert record.output_buffer.data_ptr() == output_address
    assert torch.equal(record.input_buffers["rows"], example(2, 4.0)["rows"])


def test_strided_values_are_copied_exactly(captures: list[RecordedGraph]) -> None:
    graph, _, record = captured(example(2, 1.0), captures)
    inputs = example(2, 3.0)
    assert inputs["rows"] is not None
    inputs["rows"] = inputs["rows"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(graph.replay(inputs), affine(example(2, 3.0)))
    assert record.input_buffers["rows"].is_contiguous()


def test_results_are_clones(captures: list[RecordedGraph]) -> None:
    graph, _, record = captured(example(1, 1.0), captures)
    kept = [graph.replay(example(1, float(i))) for i in range(20)]
    assert all(torch.equal(kept[i], affine(example(1, float(i)))) for i in range(20))
    assert record.output_buffer.data_ptr() not in {output.data_ptr() for output in kept}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_in_either_mode_after_capture_in_the_other(
    mode: Callable[[], Any], captures: list[RecordedGraph]
) -> None:
    graph, _, _ = captured(example(1, 1.0), captures)  # the manager captures in inference mode
    with mode():
        assert torch.equal(graph.replay(example(1, 2.0)), affine(example(1, 2.0)))


@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 64, 8)])
def test_any_output_shape_is_one_item(shape: tuple[int, ...], captures: list[RecordedGraph]) -> None:
    def forward(inputs: Inputs) -> Tensor:
        return torch.full(shape, 3.0)

    graph = manager.ManagedGraph(forward, {"x": torch.ones(1)}, OutputSpec.of(forward({})), CPU)
    graph.capture(POOL)
    assert graph.replay({"x": torch.ones(1)}).shape == shape
    assert len(captures) == 1


def test_the_forwards_own_error_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA the end of a broken capture raises another error on top of the one that broke it."""

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    original = ValueError("a host sync")
    num_runs = 0

    def forward(inputs: Inputs) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:  # the first is the manager's warm-up
            raise original
        return torch.zeros(1)

    failing = manager.ManagedGraph(forward, {"x": torch.ones(1)}, OutputSpec.of(torch.zeros(1)), CPU)
    with pytest.raises(ValueError, match="a host sync") as raised:
        failing.capture(POOL)
    assert raised.value is original
    assert "previous error" in str(original.__context__)


# Versions that cannot be driven.


class Usable:
    """A manager with the signatures that are driven, and nothing behind them."""

    def __init__(self, vllm_config: Any, device: Any, dtype: Any, model: Any) -> None:
        self.config = model.get_encoder_cudagraph_config()

    def capture(self, graph_pool: Any) -> None: ...

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        return []


class CaptureWithoutPool(Usable):
    def capture(self) -> None:  # type: ignore[override]
        ...


class ExecuteWithMore(Usable):
    def execute(self, mm_kwargs: dict[str, Any], modality: str) -> list[Tensor]:  # type: ignore[override]
        return []


class MoreToConstruct(Usable):
    def __init__(self, vllm_config: Any, device: Any, dtype: Any, model: Any, attention: Any) -> None:
        super().__init__(vllm_config, device, dtype, model)


class ReadsMoreConfig(Usable):
    def __init__(self, vllm_config: Any, device: Any, dtype: Any, model: Any) -> None:
        self.budget = vllm_config.scheduler_config.max_num_batched_tokens


def definitions() -> Any:
    return manager.load().definitions


def test_drivable_signatures_pass() -> None:
    assert manager.check(Usable, definitions()).manager is Usable


@pytest.mark.parametrize("cls", [CaptureWithoutPool, ExecuteWithMore, MoreToConstruct, ReadsMoreConfig])
def test_a_manager_that_differs_fails_with_both_versions(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "version", lambda name: "0.99.1")
    with pytest.raises(
        ConfigError, match=r"0\.26 to 0\.32, and vllm 0\.99\.1 is installed.*differs"
    ) as raised:
        manager.check(cls, definitions())
    assert "set encoder_cuda_graph to false" in str(raised.value)


def test_definitions_that_differ_fail_too() -> None:
    with pytest.raises(ConfigError, match="EncoderItemSpec"):
        manager.check(Usable, SimpleNamespace(EncoderCudaGraphConfig=dict))


def test_a_vllm_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(manager, "version", missing)
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.worker", None)
    with pytest.raises(ConfigError, match=r"0\.26 to 0\.32, and no vLLM is installed"):
        manager.load.__wrapped__()
