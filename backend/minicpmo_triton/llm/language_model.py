"""The vLLM model class; imported by vLLM alone, when it builds the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from minicpmo_triton.llm.view import PREFIX, language_model_tensor


class MiniCPMOQwen3ForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Qwen3 whose weights carry the prefix ``llm.`` among those of the encoders and the talker.

    LoRA is Qwen3's but for the input embeddings. An adapter trained on the whole model names its tensors
    ``llm.model.…``, one trained on the language model alone ``model.…``; both fit.
    """

    # vLLM embeds only the tokens of a prompt that holds embeddings too, but its LoRA layer for
    # embed_tokens expects every position: on the CPU that ends the engine, on a GPU it mixes up adapters.
    embedding_modules: ClassVar[dict[str, str]] = {"lm_head": "output_embeddings"}
    hf_to_vllm_mapper = Qwen3ForCausalLM.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix={PREFIX: ""})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the ``llm.`` tensors; raises CheckpointError for a tensor of an unknown part."""
        ours = ((language_model_tensor(name), tensor) for name, tensor in weights)
        loaded: set[str] = super().load_weights((name, tensor) for name, tensor in ours if name is not None)
        return loaded
