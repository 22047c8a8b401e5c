"""The ``llm`` model: hands each request to the engine and sends one response per increment.

A request comes with token ids and embeddings (from the ensemble), or raw; a raw one gets its embeddings
from the ``encode`` ensemble first. Triton tells this model at once when a client gives a raw request up,
which it does not do for a step of an ensemble.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack

from minicpmo_triton import schema
from minicpmo_triton.checkpoint import resolve_checkpoint
from minicpmo_triton.config import LLMParameters, resolve_dtype
from minicpmo_triton.errors import InvalidArgument, MiniCPMOError
from minicpmo_triton.llm.engine import Engine, Generation, Increment, read_engine_args, read_lora_adapters
from minicpmo_triton.llm.increment import merge_increments
from minicpmo_triton.llm.process import prepare_process
from minicpmo_triton.llm.stats import EngineStats
from minicpmo_triton.llm.thinking import AnswerSplitter
from minicpmo_triton.triton import bls, tensors
from minicpmo_triton.triton.metrics import EngineMetrics, InFlightMetric
from minicpmo_triton.triton.microbatch import MicroBatcher
from minicpmo_triton.triton.streams import POLLS_PER_ENSEMBLE_QUESTION, InFlight, Responder, Stream

#: Raw requests that wait for ``encode`` at a time; more wait in order.
CONCURRENT_ENCODES = 64
#: Iterations of the engine that one update of the metrics takes together at most.
MAX_MERGED_ITERATIONS = 256
#: Updates of the metrics are this far apart; iterations meanwhile are merged.
PUBLISH_INTERVAL_S = 0.1


#: The inputs that ask for an answer.
_PROMPTS = (schema.TEXT_INPUT, schema.MESSAGES, schema.INPUT_IDS)


@dataclass(frozen=True)
class _AnswerForm:
    """How a request wants its answer."""

    stream: bool
    sampling: bytes | None
    outputs: tuple[schema.Tensor, ...]
    prefix: str  # the input, where the answer is to begin with it


@dataclass(frozen=True)
class _Encoded:
    """What ``encode`` gives, under the names of ``schema.ENCODED``; views of Triton's memory."""

    input_ids: Any
    image_positions: Any
    audio_positions: Any
    image_embeds: torch.Tensor
    audio_embeds: torch.Tensor

    @classmethod
    def of(cls, find: Callable[[schema.Tensor], Any]) -> _Encoded:
        """From the Triton tensors that ``find`` returns."""
        values: dict[str, Any] = {}
        for spec in schema.ENCODED:
            tensor = find(spec)
            is_embeds = spec in (schema.IMAGE_EMBEDS, schema.AUDIO_EMBEDS)
            values[spec.name] = (
                torch.utils.dlpack.from_dlpack(tensor.to_dlpack()) if is_embeds else tensor.as_numpy()
            )
        return cls(**values)


def read_answer_form(request: Any, is_encoded: bool) -> _AnswerForm:
    """How to answer: the ensemble gets every output, a direct request the text and what it asks for."""
    stream = tensors.read_flag(request, schema.STREAM, default=False)
    wanted = [
        spec
        for flag, spec in schema.RETURN_FLAGS.items()
        if is_encoded or tensors.read_flag(request, flag, default=False)
    ]
    prefix = b""
    if not tensors.read_flag(request, schema.EXCLUDE_INPUT, default=True):
        if stream:
            raise InvalidArgument(
                schema.EXCLUDE_INPUT.name,
                "When streaming, `exclude_input_in_output` = False is not allowed.",
            )
        text = tensors.read_string(request, schema.TEXT_INPUT)
        if text is None:
            raise InvalidArgument(schema.EXCLUDE_INPUT.name, "false goes with text_input only")
        prefix = text
    return _AnswerForm(
        stream=stream,
        sampling=tensors.read_string(request, schema.SAMPLING_PARAMETERS),
        outputs=(schema.TEXT_OUTPUT, *wanted),
        prefix=prefix.decode(errors="replace"),
    )


def answer_outputs(increment: Increment, form: _AnswerForm, splitter: AnswerSplitter) -> list[Any]:
    """The outputs that were asked for, one element per sequence of the increment.

    The thinking is taken out of the text only for those who get it as an output of its own.
    """
    thinking: tuple[str, ...] = ()
    texts = increment.texts
    if schema.REASONING_OUTPUT in form.outputs:
        thinking, texts = splitter.split(increment)
    values: dict[schema.Tensor, Callable[[], Any]] = {
        schema.TEXT_OUTPUT: lambda: [(form.prefix + text).encode() for text in texts],
        schema.REASONING_OUTPUT: lambda: [text.encode() for text in thinking],
        schema.FINISH_REASON: lambda: [(reason or "").encode() for reason in increment.finish_reasons],
        # Nothing rather than a made-up number where log-probabilities were not asked for.
        schema.CUMULATIVE_LOGPROB: lambda: [p for p in increment.cumulative_logprobs if p is not None],
        schema.LOGPROBS: lambda: [json.dumps(logprobs).encode() for logprobs in increment.logprobs],
        schema.NUM_INPUT_TOKENS: lambda: [increment.num_input_tokens],
        schema.NUM_OUTPUT_TOKENS: lambda: increment.num_output_tokens,
    }
    return [tensors.output(spec, values[spec]()) for spec in form.outputs]


class _Answer:
    """Increments of one request on their way out: those that gather while Triton is busy leave together.

    With many streams a response each token would keep the process busy with responses alone.
    """

    def __init__(self, form: _AnswerForm, splitter: AnswerSplitter, stream: Stream) -> None:
        self._form = form
        self._splitter = splitter
        self._stream = stream
        self._lock = threading.Lock()
        self._waiting: list[Increment] = []

    def add(self, increment: Increment) -> None:
        with self._lock:
            self._waiting.append(increment)
            if len(self._waiting) > 1:
                return  # a response is queued and takes this one along
        self._stream.send(self._responses)

    def _responses(self) -> list[Any]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return [
            tensors.response(answer_outputs(increment, self._form, self._splitter))
            for increment in merge_increments(waiting)
        ]


class LLMModel:
    """Owns the engine; an encoded request costs ``execute`` a parse and a hand-over."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_process()
        torch.set_num_threads(1)  # this process only moves embeddings; threads that meet for that cost more
        parameters = LLMParameters.read(tensors.model_config(args).get("parameters", {}))
        folder = Path(args["model_repository"]) / args["model_version"]
        engine_args = read_engine_args(folder / "model.json")
        checkpoint = resolve_checkpoint(parameters.checkpoint)
        dtype = resolve_dtype(parameters.dtype, torch.cuda.is_available())
        self._engine_metrics: EngineMetrics | None = None
        self._statistics: MicroBatcher[EngineStats] = MicroBatcher(
            "metrics", self._publish, MAX_MERGED_ITERATIONS
        )
        self._engine = Engine.start(
            checkpoint,
            engine_args,
            dtype,
            lora_adapters=read_lora_adapters(folder, engine_args),
            on_stats=self._statistics.submit if parameters.report_custom_metrics else None,
        )
        if parameters.report_custom_metrics:
            self._engine_metrics = EngineMetrics(
                args["model_name"], args["model_version"], self._engine.facts.max_model_len
            )
        self._responder = Responder()
        self._metric = InFlightMetric(args["model_name"], args["model_version"])
        self._in_flight = InFlight(self._metric.set)
        self._encodes = ThreadPoolExecutor(CONCURRENT_ENCODES, thread_name_prefix="encode")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            stream = Stream(
                request.request_id(), request.get_response_sender(), self._responder, bls.relayed_id(request)
            )
            try:
                self._take(request, stream)
            except BaseException as error:
                self._end(stream, tensors.as_reply_error(error))

    def _take(self, request: Any, stream: Stream) -> None:
        cancelled_id = tensors.read_string(request, schema.CANCEL_REQUEST_ID)
        if cancelled_id is not None:
            if not cancelled_id:  # the id of every request that was sent without one
                raise InvalidArgument(schema.CANCEL_REQUEST_ID.name, "is empty")
            if any(tensors.read_array(request, spec) is not None for spec in _PROMPTS):
                raise InvalidArgument(schema.CANCEL_REQUEST_ID.name, "comes alone, without a prompt")
            self._in_flight.cancel(cancelled_id.decode(errors="replace"))
            stream.finish()
            return
        is_encoded = tensors.read_array(request, schema.INPUT_IDS) is not None
        form = read_answer_form(request, is_encoded)
        if is_encoded:
            stream.polls_per_question = POLLS_PER_ENSEMBLE_QUESTION
        self._in_flight.add(stream)
        if is_encoded:
            self._generate(_Encoded.of(lambda spec: tensors.require(request, spec)), form, stream)
        else:
            self._encodes.submit(self._encode_and_generate, request, form, stream)

    def _encode_and_generate(self, request: Any, form: _AnswerForm, stream: Stream) -> None:
        try:
            stream.raise_if_cancelled()
            inputs = bls.inputs_of(request, schema.MEDIA_INPUTS)
            response = bls.ask(schema.ENCODE.name, inputs, schema.ENCODED)
            stream.raise_if_cancelled()
            self._generate(_Encoded.of(lambda spec: bls.output(response, spec)), form, stream)
        except BaseException as error:
            self._end(stream, tensors.as_reply_error(error))

    def _generate(self, encoded: _Encoded, form: _AnswerForm, stream: Stream) -> None:
        """Hand over to the engine, which copies what it needs before ``submit`` returns."""
        generation = Generation(
            request_id=stream.request_id,
            sampling=self._engine.sampling(form.sampling, len(encoded.input_ids)),
            stream=form.stream,
            **vars(encoded),
        )
        answer = _Answer(form, self._engine.answer_splitter(generation), stream)
        handle = self._engine.submit(
            generation,
            on_output=answer.add,
            on_done=lambda error: self._end(stream, error),
        )
        stream.begin(handle)

    def _publish(self, records: list[EngineStats]) -> None:
        if self._engine_metrics is not None:  # None while the engine starts: it runs trials then
            self._engine_metrics.publish(records)
            time.sleep(PUBLISH_INTERVAL_S)

    def _end(self, stream: Stream, error: MiniCPMOError | None) -> None:
        self._in_flight.remove(stream)
        stream.finish(error)

    def finalize(self) -> None:
        # Triton has waited for every request by now, unless it gave up on one that would hang here too.
        self._encodes.shutdown(wait=False, cancel_futures=True)
        self._engine.shutdown()
        self._in_flight.close()
        self._responder.close()
        self._statistics.close()
