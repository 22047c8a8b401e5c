"""The ``llm`` model: hands each request to the engine and sends one response per increment."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from minicpmo_triton import schema
from minicpmo_triton.checkpoint import resolve_checkpoint
from minicpmo_triton.config import LLMParameters, resolve_dtype
from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.llm.engine import Engine, Generation, Handle, Increment, read_engine_args
from minicpmo_triton.triton import tensors


class _Stream:
    """One request on its way. The engine calls ``on_output`` and ``on_done`` on its loop."""

    def __init__(self, sender: Any, responder: _Responder) -> None:
        self._sender = sender
        self._responder = responder
        self.handle: Handle | None = None

    def on_output(self, increment: Increment) -> None:
        self._responder.put(lambda: self._send(increment))

    def on_done(self, error: MiniCPMOError | None) -> None:
        self._responder.put(lambda: self._finish(error))

    def _send(self, increment: Increment) -> None:
        self._sender.send(tensors.response(answer_outputs(increment)))
        if self._sender.is_cancelled() and self.handle is not None:
            self.handle.cancel()

    def _finish(self, error: MiniCPMOError | None) -> None:
        if error is None:
            self._sender.send(flags=tensors.FINAL)
        else:
            tensors.send_final(self._sender, tensors.error_response(error))


class _Responder:
    """Builds and sends responses on a thread of its own, so that the engine's loop never waits for Triton."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Send what is waiting, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # a client that has gone must not stop the others' answers
                tensors.as_reply_error(error)


def answer_outputs(increment: Increment) -> list[Any]:
    """The outputs of ``schema.ANSWER`` for one increment, one element per sequence in it."""
    values = {
        schema.TEXT_OUTPUT: [text.encode() for text in increment.texts],
        schema.FINISH_REASON: [(reason or "").encode() for reason in increment.finish_reasons],
        # Nothing rather than a made-up number where log-probabilities were not asked for.
        schema.CUMULATIVE_LOGPROB: [p for p in increment.cumulative_logprobs if p is not None],
        schema.LOGPROBS: [json.dumps(logprobs).encode() for logprobs in increment.logprobs],
        schema.NUM_INPUT_TOKENS: [increment.num_input_tokens],
        schema.NUM_OUTPUT_TOKENS: increment.num_output_tokens,
    }
    return [tensors.output(spec, values[spec]) for spec in schema.ANSWER]


class LLMModel:
    """Owns the engine; one request costs ``execute`` a parse and a hand-over."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = LLMParameters.read(tensors.model_config(args).get("parameters", {}))
        folder = Path(args["model_repository"]) / args["model_version"]
        engine_args = read_engine_args(folder / "model.json")
        checkpoint = resolve_checkpoint(parameters.checkpoint)
        dtype = resolve_dtype(parameters.dtype, torch.cuda.is_available())
        self._engine = Engine.start(checkpoint, engine_args, dtype)
        self._responder = _Responder()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            stream = _Stream(sender, self._responder)
            try:
                generation = self._read(request)
            except BaseException as error:
                stream.on_done(tensors.as_reply_error(error))
                continue
            stream.handle = self._engine.submit(generation, stream.on_output, stream.on_done)

    def _read(self, request: Any) -> Generation:
        input_ids = tensors.require_array(request, schema.INPUT_IDS)
        sampling = tensors.read_string(request, schema.SAMPLING_PARAMETERS)
        return Generation(
            request_id=request.request_id(),
            input_ids=input_ids,
            image_positions=tensors.require_array(request, schema.IMAGE_POSITIONS),
            audio_positions=tensors.require_array(request, schema.AUDIO_POSITIONS),
            image_embeds=tensors.require_torch(request, schema.IMAGE_EMBEDS),
            audio_embeds=tensors.require_torch(request, schema.AUDIO_EMBEDS),
            sampling=self._engine.sampling(sampling, len(input_ids)),
            stream=tensors.read_flag(request, schema.STREAM, default=False),
        )

    def finalize(self) -> None:
        self._engine.shutdown()
        self._responder.close()
