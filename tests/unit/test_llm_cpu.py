"""On a CPU the engine's worker lives in the engine core's process, unless the operator has decided."""

from __future__ import annotations

import os
from typing import Any

import pytest

from minicpmo_triton.llm.cpu import cpu_args, num_threads

NAME = "distributed_executor_backend"


@pytest.mark.parametrize("args", [{}, {"tensor_parallel_size": 1, "enforce_eager": True}, {NAME: None}])
def test_a_cpu_gets_no_worker_process(args: dict[str, Any]) -> None:
    assert list(cpu_args(args, is_cpu=True)) == [NAME]


@pytest.mark.parametrize(
    "args",
    [
        {NAME: "mp"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
)
def test_the_operators_word_stands(args: dict[str, Any]) -> None:
    assert cpu_args(args, is_cpu=True) == {}


def test_a_gpu_keeps_vllms_default() -> None:
    assert cpu_args({}, is_cpu=False) == {}


def test_vllm_takes_it_for_its_own_executor() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = resolve_obj_by_qualname(cpu_args({}, is_cpu=True)[NAME])
    assert executor is UniProcExecutor
    assert issubclass(executor, Executor)


def test_one_core_is_left_to_the_server() -> None:
    cores = len(os.sched_getaffinity(0))
    assert num_threads() == max(cores - 1, 1)
