"""vLLM's AsyncLLM on an asyncio loop of its own, in a thread of its own.

Everything that touches AsyncLLM runs on that loop, and so do the callbacks of a request; they must be
quick. Whatever happens to a request, its ``on_done`` is called exactly once, after its last
``on_output``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minicpmo_triton.errors import Cancelled, InvalidArgument, MiniCPMOError, Unavailable
from minicpmo_triton.llm import process
from minicpmo_triton.llm.cpu import cpu_args, is_cpu
from minicpmo_triton.llm.engine_args import merge_engine_args, read_engine_args
from minicpmo_triton.llm.generation import (
    Generation,
    Prompt,
    build_prompt,
    compile_kernels,
    engine_input,
    validate,
)
from minicpmo_triton.llm.increment import Increment, to_increment
from minicpmo_triton.llm.loop import RunningLLM, start_llm
from minicpmo_triton.llm.lora import lora_engine_args, lora_requests, read_lora_adapters
from minicpmo_triton.llm.sampling import Sampling, parse_sampling_parameters, refused_by_vllm
from minicpmo_triton.llm.stats import EngineStats, OnStats
from minicpmo_triton.llm.step_graphs import major_capability, step_graph_args
from minicpmo_triton.llm.thinking import AnswerSplitter, begins_thinking
from minicpmo_triton.llm.view import open_view

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = [
    "AnswerSplitter",
    "Engine",
    "EngineStats",
    "Generation",
    "Handle",
    "Increment",
    "Sampling",
    "read_engine_args",
    "read_lora_adapters",
    "validate",
]

OnOutput = Callable[[Increment], None]
OnDone = Callable[["MiniCPMOError | None"], None]

_ABORT_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class Handle:
    """A request on its way."""

    def __init__(self, engine: Engine, client_id: str, number: int) -> None:
        self.client_id = client_id
        self.request_id = f"{client_id}#{number}"  # unique, whatever clients call their requests
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False  # the loop's

    def cancel(self) -> None:
        """Give the request up: it ends with :class:`Cancelled` unless it has ended. From any thread."""
        self._engine._call(self._cancel_on_loop)

    def _cancel_on_loop(self) -> None:
        if self._is_cancelled:
            return  # once more could cut short what aborts it in the engine
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()


class Engine:
    """The language model. Made by :meth:`start`, ended by :meth:`shutdown`."""

    def __init__(self, running: RunningLLM, view: tempfile.TemporaryDirectory[str]) -> None:
        self.facts = running.facts
        self._running = running
        self._llm = running.llm
        self._loop = running.loop
        self._view = view
        self._handles: dict[str, Handle] = {}
        self._lock = threading.Lock()  # guards _handles, _num_requests and _closed
        self._num_requests = 0
        self._closed = False
        _failure_log(view).unlink(missing_ok=True)  # what comes later is of the running engine
        compile_kernels(self.facts.dtype)

    @classmethod
    def start(
        cls,
        checkpoint_dir: Path,
        engine_args: Mapping[str, Any],
        dtype: str,
        env: Mapping[str, str] = os.environ,
        *,
        lora_adapters: Mapping[str, Path] = MappingProxyType({}),
        on_stats: OnStats | None = None,
    ) -> Engine:
        """Start vLLM on a local checkpoint folder and wait until it is ready (tens of seconds).

        ``engine_args`` are those of model.json, ``MINICPMO_ENGINE_ARGS`` in ``env`` wins; ``dtype`` is
        ``bfloat16`` or ``float32``. ``lora_adapters`` (see :func:`read_lora_adapters`) are loaded now and
        need the argument ``enable_lora``. ``on_stats`` gets a record after every iteration, on the
        engine's loop, so it must be quick; None costs nothing. Raises :class:`ConfigError` for an argument
        or an adapter, :class:`CheckpointError` for the folder, and otherwise :class:`MiniCPMOError` with
        the reason that vLLM, or its engine's process, gives.
        """
        process.prepare_process()
        args = merge_engine_args(engine_args, env)
        args |= lora_engine_args(args, lora_adapters)
        args |= step_graph_args(args, major_capability())
        args |= cpu_args(args, is_cpu())
        view = open_view(checkpoint_dir, with_weights=args.get("load_format") != "dummy")
        args |= {"model": view.name, "tokenizer": view.name, "dtype": dtype, "enable_prompt_embeds": True}
        try:
            with process.engine_environment(_failure_log(view)):
                # No name for what runs here: frames of this function live on in tracebacks that
                # vLLM's imports keep, and with them AsyncLLM would outlive shutdown.
                return cls(start_llm(args, lora_requests(lora_adapters), on_stats), view)
        except BaseException as error:
            reason = process.first_failure(_failure_log(view)) or process.one_line(error)
            view.cleanup()
            if isinstance(error, MiniCPMOError) or not isinstance(error, Exception):
                raise
            raise MiniCPMOError(f"vLLM could not start: {reason}") from error

    def sampling(self, text: bytes | str | None, num_input_tokens: int) -> Sampling:
        """Parse ``sampling_parameters`` with the checkpoint's defaults and this engine's context."""
        return parse_sampling_parameters(
            text,
            self.facts.sampling_defaults,
            num_input_tokens=num_input_tokens,
            max_model_len=self.facts.max_model_len,
            vocab_size=self.facts.vocab_size,
            adapters=self.facts.adapters,
        )

    def answer_splitter(self, generation: Generation) -> AnswerSplitter:
        """Splits this request's increments, each once and in order, into thinking and answer."""
        tokens = self.facts.thinking_tokens
        return AnswerSplitter(tokens, tokens is not None and begins_thinking(generation.input_ids, tokens))

    def submit(self, generation: Generation, on_output: OnOutput, on_done: OnDone) -> Handle:
        """Check and queue a request; returns at once and raises nothing about the request.

        ``on_output`` gets each increment, ``on_done`` the outcome: None, :class:`InvalidArgument`,
        :class:`Cancelled`, :class:`Unavailable` or another :class:`MiniCPMOError`. Both are called on
        the engine's loop (after :meth:`shutdown`, ``on_done`` on the caller's thread).
        """
        handle = self._new_handle(generation.request_id)
        prompt: Prompt | None = None
        problem: MiniCPMOError | None = None
        try:  # on the caller's thread: the loop must not wait for megabytes to be copied
            validate(
                generation,
                hidden_size=self.facts.hidden_size,
                vocab_size=self.facts.vocab_size,
                max_model_len=self.facts.max_model_len,
            )
            prompt = build_prompt(generation, self.facts.dtype)
        except Exception as error:
            problem = self._outcome(error)

        def begin() -> None:
            if prompt is None:
                self._end(handle, on_done, problem)
                return
            task = self._loop.create_task(self._generate(handle, generation, prompt, on_output))
            task.add_done_callback(lambda done: self._end(handle, on_done, self._task_outcome(done)))
            handle._task = task
            if handle._is_cancelled:  # by its id, before it began
                task.cancel()

        if not self._call(begin):
            self._end(handle, on_done, problem or _stopped())
        return handle

    def cancel(self, request_id: str) -> int:
        """Cancel the requests in flight that came with this id; returns their number. Any thread."""
        with self._lock:
            found = [handle for handle in self._handles.values() if handle.client_id == request_id]
        for handle in found:
            handle.cancel()
        return len(found)

    def is_alive(self) -> bool:
        """Whether the engine answers requests."""
        return not self._closed and not self._llm.errored

    def shutdown(self) -> None:
        """End requests in flight (Unavailable), the engine's process and the loop. Not from a callback."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._running.stop()
        self._view.cleanup()
        # AsyncLLM shuts itself down once more when it is collected, which fails while Python exits.
        del self._running, self._llm

    def _new_handle(self, request_id: str) -> Handle:
        with self._lock:
            self._num_requests += 1
            handle = Handle(self, request_id, self._num_requests)
            self._handles[handle.request_id] = handle
        return handle

    def _call(self, function: Callable[[], None]) -> bool:
        """Run on the loop; False once the engine is shut down (then it does not run)."""
        with self._lock:  # or shutdown could stop the loop between the check and the call
            if self._closed:
                return False
            self._loop.call_soon_threadsafe(function)
            return True

    async def _generate(
        self, handle: Handle, generation: Generation, prompt: Prompt, on_output: OnOutput
    ) -> None:
        params = _with_output_kind(generation.sampling.params, generation.stream)
        adapter = self.facts.adapter(generation.sampling.lora_name)
        outputs = self._llm.generate(engine_input(prompt), params, handle.request_id, lora_request=adapter)
        async with contextlib.aclosing(outputs):  # aborts in the engine if anything below raises
            async for output in outputs:
                increment = to_increment(output, len(prompt.token_ids))
                if "error" in increment.finish_reasons:
                    raise _failed_in_engine(params)
                _deliver(on_output, increment)

    def _end(self, handle: Handle, on_done: OnDone, outcome: MiniCPMOError | None) -> None:
        with self._lock:
            self._handles.pop(handle.request_id, None)
        # The task of a request that was cancelled holds its frames, which hold the handle: without this its
        # embeddings would stay until the garbage collector comes round.
        handle._task = None
        try:
            on_done(outcome)
        except Exception:
            _logger.exception("on_done of request %s failed", handle.request_id)

    def _task_outcome(self, task: asyncio.Task[None]) -> MiniCPMOError | None:
        if task.cancelled():
            return _stopped() if self._closed else Cancelled("the request was cancelled")
        return self._outcome(task.exception())

    def _outcome(self, error: BaseException | None) -> MiniCPMOError | None:
        if error is None or isinstance(error, MiniCPMOError):
            return error
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError) or not self.is_alive():
            failure = process.first_failure(_failure_log(self._view))
            reason = f" ({failure})" if failure else ""
            return Unavailable(f"the language model's engine has stopped{reason}; restart the server")
        if _is_refusal(error):
            return refused_by_vllm(error)
        if _is_overload(error):
            return Unavailable(f"{process.one_line(error)}; try again later")
        cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
        _logger.error("a request failed", exc_info=cause)
        return MiniCPMOError(f"the engine failed on this request: {process.one_line(cause)}")

    async def _close(self) -> None:
        tasks = [handle._task for handle in list(self._handles.values()) if handle._task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_TIMEOUT_S)
        self._llm.shutdown()


def _with_output_kind(sampling: SamplingParams, stream: bool) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind

    params = sampling.clone()
    params.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return params


def _failed_in_engine(params: SamplingParams) -> MiniCPMOError:
    """What ended a request in vLLM's scheduler. A constraint is compiled there, after the checks."""
    if params.structured_outputs is not None:
        return InvalidArgument(
            "sampling_parameters.structured_outputs",
            "the engine cannot compile this constraint, or follow it",
        )
    return MiniCPMOError("the engine failed on this request; it may be sent again")


def _deliver(on_output: OnOutput, increment: Increment) -> None:
    try:
        on_output(increment)
    except MiniCPMOError:
        raise
    except Exception as error:
        raise MiniCPMOError(f"the answer could not be delivered: {process.one_line(error)}") from error


def _is_refusal(error: BaseException) -> bool:
    from vllm import exceptions

    # vLLM 0.32 has a class for what the client got wrong; in 0.26 it is any ValueError.
    return isinstance(error, getattr(exceptions, "VLLMClientError", ValueError))


def _is_overload(error: BaseException) -> bool:
    from vllm import exceptions

    return isinstance(error, getattr(exceptions, "GracefulHTTPError", ()))


def _failure_log(view: tempfile.TemporaryDirectory[str]) -> Path:
    return Path(view.name) / "engine-failure.txt"


def _stopped() -> Unavailable:
    return Unavailable("the language model is shut down; start the server again")
