"""vLLM's entry point ``vllm.general_plugins``: the language model inside a MiniCPM-o checkpoint."""

from __future__ import annotations

from minicpmo_triton.llm import process

#: Named in the view's config.json; the suffix tells vLLM that it generates.
ARCHITECTURE = "MiniCPMOQwen3ForCausalLM"


def register() -> None:
    """Make the architecture known; vLLM calls this in every one of its processes, maybe repeatedly.

    The class is given by name, so nothing of the model is imported before vLLM builds it.
    """
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"minicpmo_triton.llm.language_model:{ARCHITECTURE}")
    process.attach()
