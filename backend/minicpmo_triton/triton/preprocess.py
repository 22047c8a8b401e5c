"""The ``preprocess`` model: each request on its own thread, all of them over one decoding pool."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minicpmo_triton import schema
from minicpmo_triton.checkpoint import resolve_checkpoint
from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.memory import keep_freed_memory
from minicpmo_triton.preprocess import Preprocessor
from minicpmo_triton.request import RawRequest
from minicpmo_triton.triton import tensors
from minicpmo_triton.triton.metrics import RequestMetrics

#: Requests of one instance that are preprocessed at a time; more wait in order.
CONCURRENT_REQUESTS = 16


def read_request(request: Any) -> RawRequest:
    """Copy a Triton request's inputs out of its memory."""
    return RawRequest(
        text_input=tensors.read_string(request, schema.TEXT_INPUT),
        messages=tensors.read_string(request, schema.MESSAGES),
        images=tensors.read_strings(request, schema.IMAGE),
        audios=tensors.read_strings(request, schema.AUDIO),
        videos=tensors.read_strings(request, schema.VIDEO),
        media_parameters=tensors.read_string(request, schema.MEDIA_PARAMETERS),
    )


class Preprocess:
    """Answers every request from a worker thread, so that a large photograph delays nobody else."""

    def initialize(self, args: Mapping[str, str]) -> None:
        keep_freed_memory()
        parameters = PreprocessParameters.read(tensors.model_config(args).get("parameters", {}))
        self._preprocessor = Preprocessor(resolve_checkpoint(parameters.checkpoint), parameters)
        self._requests = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="request")
        self._metrics = RequestMetrics(args["model_name"], args["model_instance_name"])

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._requests.submit(self._answer, request, request.get_response_sender(), time.perf_counter())

    def _answer(self, request: Any, sender: Any, arrived: float) -> None:
        started = time.perf_counter()
        try:
            done = self._preprocessor.process(read_request(request))
            reply = tensors.response(
                [tensors.output(spec, getattr(done, spec.name)) for spec in schema.PREPROCESS.outputs]
            )
        except BaseException as error:  # one reply per request, whatever happened
            reply = tensors.error_response(tensors.as_reply_error(error))
        tensors.send_final(sender, reply)
        self._metrics.observe(started - arrived, time.perf_counter() - arrived)

    def finalize(self) -> None:
        self._requests.shutdown(wait=True)
        self._preprocessor.close()
