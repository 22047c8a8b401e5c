"""How vLLM runs where there is no GPU, which is where this project is tried and tested.

By default vLLM on a CPU puts its worker into a process of its own and lets both sides spin on shared memory
while they wait for each other, a core each. On two cores that starved the server and its clients for
seconds at a time. In the engine core's own process nothing waits, answers are as fast, and the start takes
8 s less.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: vLLM turns the short name, ``uni``, back into worker processes on a CPU.
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
#: Arguments that ask for more than one worker.
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def cpu_args(engine_args: Mapping[str, Any], is_cpu: bool) -> dict[str, Any]:
    """Engine arguments to add to ``engine_args``: none on a GPU, or where those decide about the workers."""
    is_decided = engine_args.get("distributed_executor_backend") or any(
        engine_args.get(name) not in (None, 1) for name in _PARALLEL
    )
    return {"distributed_executor_backend": _IN_PROCESS} if is_cpu and not is_decided else {}


def is_cpu() -> bool:
    """Whether vLLM would run on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def num_threads() -> int:
    """OpenMP threads of the engine on a CPU: one core is left to the server, as vLLM itself has it."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)
