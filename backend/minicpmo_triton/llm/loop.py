"""The thread and the asyncio loop in which vLLM's AsyncLLM lives, from its start to its end."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

from minicpmo_triton.errors import ConfigError
from minicpmo_triton.llm.process import one_line
from minicpmo_triton.llm.stats import OnStats, stat_logger
from minicpmo_triton.llm.thinking import END_TAG, START_TAG, TURN_TAG, ThinkingTokens

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    hidden_size: int
    vocab_size: int
    max_model_len: int  # prompt and answer together, tokens
    dtype: torch.dtype
    sampling_defaults: Mapping[str, Any]  # of the checkpoint's generation_config.json
    thinking_tokens: ThinkingTokens | None  # None where the tokenizer has no such tags
    adapters: Mapping[str, LoRARequest] | None  # by name; None where LoRA is off

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The LoRA adapter of a checked name; None for none."""
        return None if name is None or self.adapters is None else self.adapters[name]


@dataclass(frozen=True)
class RunningLLM:
    """A started AsyncLLM; only the loop's thread may call it."""

    llm: AsyncLLM
    facts: ModelFacts
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    processes: tuple[BaseProcess, ...]  # of the engine core

    def stop(self) -> None:
        """Wait for the loop's thread and the engine's processes; AsyncLLM must be shut down before."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        _reap(self.processes)


def start_llm(
    args: Mapping[str, Any], adapters: Mapping[str, LoRARequest], on_stats: OnStats | None
) -> RunningLLM:
    """Start AsyncLLM with these engine arguments and wait for it; whatever vLLM raises comes out."""
    started: Future[tuple[AsyncLLM, ModelFacts, asyncio.AbstractEventLoop]] = Future()
    others = set(multiprocessing.active_children())
    thread = threading.Thread(
        target=_run, args=(_start(args, adapters, on_stats), started), name="vllm-loop", daemon=True
    )
    thread.start()
    try:
        llm, facts, loop = started.result()
    except BaseException:
        thread.join()
        _reap(set(multiprocessing.active_children()) - others)
        raise
    processes = set(multiprocessing.active_children()) - others
    return RunningLLM(llm, facts, loop, thread, tuple(processes))


def _reap(processes: Iterable[BaseProcess]) -> None:
    """Wait for processes that should be gone; vLLM kills one that is slow, but leaves it a zombie."""
    for process in processes:
        process.join(_EXIT_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run(
    start: Coroutine[Any, Any, tuple[AsyncLLM, ModelFacts]],
    started: Future[tuple[AsyncLLM, ModelFacts, asyncio.AbstractEventLoop]],
) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        llm, facts = loop.run_until_complete(start)
    except BaseException as error:
        started.set_exception(error)
        _finish(loop)
        return
    started.set_result((llm, facts, loop))
    try:
        loop.run_forever()
    finally:
        _finish(loop)


async def _start(
    args: Mapping[str, Any], adapters: Mapping[str, LoRARequest], on_stats: OnStats | None
) -> tuple[AsyncLLM, ModelFacts]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        engine_args = AsyncEngineArgs(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine arguments: {one_line(error)}") from error
    # A logger of ours turns the statistics on, whatever disable_log_stats says of vLLM's own.
    loggers = None if on_stats is None else [stat_logger(on_stats)]
    llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=loggers)
    try:
        await _load_adapters(llm, adapters)
    except BaseException:
        llm.shutdown()
        raise
    config = llm.model_config  # as the engine settled it: max_model_len may have been fitted to memory
    facts = ModelFacts(
        hidden_size=config.get_hidden_size(),
        vocab_size=config.get_vocab_size(),
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        sampling_defaults=config.get_diff_sampling_param(),
        thinking_tokens=_thinking_tokens(llm.get_tokenizer().get_vocab()),
        adapters=adapters if llm.vllm_config.lora_config else None,
    )
    return llm, facts


async def _load_adapters(llm: AsyncLLM, adapters: Mapping[str, LoRARequest]) -> None:
    if adapters and not llm.vllm_config.lora_config:
        raise ConfigError("LoRA adapters need the engine argument enable_lora")
    for name, request in adapters.items():
        try:
            await llm.add_lora(request)
        except Exception as error:
            raise ConfigError(f"LoRA adapter {name} cannot be loaded: {one_line(error)}") from error


def _thinking_tokens(vocabulary: Mapping[str, int]) -> ThinkingTokens | None:
    tags = (START_TAG, END_TAG, TURN_TAG)
    return ThinkingTokens(*(vocabulary[tag] for tag in tags)) if all(t in vocabulary for t in tags) else None


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Let what vLLM left on the loop end, so that nothing is destroyed while pending."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
