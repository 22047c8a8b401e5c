"""Which of its steps vLLM replays as CUDA graphs.

By default vLLM replays a step with a prefill in it piece by piece, its attention launched in between, and up
to 512 tokens only; beyond, and there the requests with images and minutes of audio are, the host launches
every kernel. FlashAttention 3 lets the whole step be one graph. On an H200 that took the first token of a
short prompt from 21 to 15 ms (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: FlashAttention 3 runs on this generation (Hopper) alone; with its predecessor vLLM's default is as good.
_MAJOR_CAPABILITY = 9
#: Tokens of the steps that are captured: vLLM's own up to 512, then coarser.
CAPTURE_SIZES = (
    1,
    2,
    4,
    *range(8, 256, 8),
    *range(256, 512, 16),
    *range(512, 1024, 64),
    *range(1024, 2049, 128),
)
#: Arguments by which an operator has decided about graphs, or about what they depend on.
_DECIDED_BY = (
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "enforce_eager",
    "optimization_level",
    "performance_mode",
    "attention_backend",
    "attention_config",
    "speculative_config",
)


def step_graph_args(engine_args: Mapping[str, Any], major_capability: int | None) -> dict[str, Any]:
    """Engine arguments to add to ``engine_args``: none where those decide about graphs themselves.

    ``major_capability`` is the device's, None without an NVIDIA GPU.
    """
    if major_capability != _MAJOR_CAPABILITY or any(engine_args.get(name) for name in _DECIDED_BY):
        return {}
    return {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": list(CAPTURE_SIZES)}}


def major_capability() -> int | None:
    """Of the first GPU, without a CUDA context in this process; None where vLLM finds no NVIDIA GPU."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if capability is None else int(capability.major)
