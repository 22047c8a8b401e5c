"""A capture that fails on a real device. In a file of its own, run after the others: what torch's allocator
keeps of a broken capture must not meet tests that measure memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minicpmo_triton.errors import Unavailable
from minicpmo_triton.graphs.policy import Inputs
from tests.gpu.test_graph_adapter_gpu import MIB, Mlp, adapter_over, inference, mlp, pytestmark, random_rows

__all__ = ["inference", "mlp", "pytestmark"]  # fixtures and marks of the tests below


def syncs_under_capture(inputs: Inputs) -> Tensor:
    rows = inputs["rows"]
    assert rows is not None
    if torch.cuda.is_current_stream_capturing():
        rows.sum().item()  # a host sync: CUDA breaks the capture
    return rows * 2


def raises_under_capture(inputs: Inputs) -> Tensor:
    rows = inputs["rows"]
    assert rows is not None
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not under capture")
    return rows * 2


@pytest.mark.parametrize("forward", [raises_under_capture, syncs_under_capture])
def test_a_failed_capture_latches_and_the_process_answers(
    forward: Callable[[Inputs], Tensor], mlp: Mlp
) -> None:
    failing, other = adapter_over(forward), adapter_over(mlp)
    rows = random_rows(8, 0)
    want = mlp({"rows": rows})
    for _ in range(3):
        other({"rows": rows})
    stream = torch.cuda.current_stream()
    failing({"rows": rows})
    with pytest.raises((ValueError, RuntimeError)) as raised:
        failing({"rows": rows})
    print(f"\noriginal: {type(raised.value).__name__}: {str(raised.value).splitlines()[0]}")
    assert "previous error" not in str(raised.value)  # that is what CUDA adds to the original
    assert torch.cuda.current_stream() == stream
    for _ in range(3):
        with pytest.raises(Unavailable, match="set encoder_cuda_graph to false"):
            failing({"rows": rows})
    assert failing.get_cumulative_stats().capture_failures == 1

    assert torch.allclose(other({"rows": rows}), want, atol=1e-5)  # an old graph
    more = random_rows(24, 1)
    for _ in range(3):  # and a new one
        assert torch.allclose(other({"rows": more}), mlp({"rows": more}), atol=1e-5)
    assert other.get_cumulative_stats().num_graphs == 2
    big = torch.ones(64 * MIB, device="cuda")
    assert float(big.sum()) == 64 * MIB
    del big
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
