"""The vLLM model class; imported by vLLM alone, when it builds the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from minicpmo_triton.llm.view import language_model_tensor


class MiniCPMOQwen3ForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Qwen3 whose weights carry the prefix ``llm.`` among those of the encoders and the talker."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the ``llm.`` tensors; raises CheckpointError for a tensor of an unknown part."""
        ours = ((language_model_tensor(name), tensor) for name, tensor in weights)
        loaded: set[str] = super().load_weights((name, tensor) for name, tensor in ours if name is not None)
        return loaded
