"""The ``minicpmo_unary`` model: one request, one response, over the same pipeline."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from minicpmo_triton import schema
from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.triton import bls, tensors
from minicpmo_triton.triton.streams import InFlight, Responder, Stream, relayed_id

#: Requests that wait for an answer at a time; more wait in order.
CONCURRENT_REQUESTS = 128


class _Relayed:
    """A generation of ``llm`` that this model asked for; cancelled by its id.

    The client may cancel it by its own: Triton does not notice that a client of HTTP ``infer`` has gone.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def cancel(self) -> None:
        # On a thread of its own: the caller may be the one that watches every request.
        threading.Thread(target=self._cancel, daemon=True).start()

    def _cancel(self) -> None:
        name = np.array([self.request_id.encode()], dtype=np.object_)
        inputs = [pb_utils.Tensor(schema.CANCEL_REQUEST_ID.name, name)]
        for _ in bls.stream(schema.LLM.name, inputs, (schema.TEXT_OUTPUT,), request_id=""):
            pass


class UnaryModel:
    """Relays a request to ``llm`` with every output asked for, and answers with its one response."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._responder = Responder()
        self._in_flight = InFlight()
        self._requests = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="request")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            stream = Stream(request.request_id(), request.get_response_sender(), self._responder)
            self._in_flight.add(stream)
            self._requests.submit(self._answer, request, stream)

    def _answer(self, request: Any, stream: Stream) -> None:
        try:
            reply = tensors.response(self._ask(request, stream))
        except BaseException as error:
            reply = tensors.error_response(tensors.as_reply_error(error))
        self._in_flight.remove(stream)
        stream.finish_with(reply)

    def _ask(self, request: Any, stream: Stream) -> list[Any]:
        stream.raise_if_cancelled()
        passed_on = (*schema.MEDIA_INPUTS, schema.SAMPLING_PARAMETERS, schema.EXCLUDE_INPUT)
        inputs = bls.inputs_of(request, passed_on)
        inputs += [tensors.output(flag, [True]) for flag in schema.RETURN_FLAGS]
        work = _Relayed(relayed_id(stream.request_id))
        stream.begin(work)
        responses = list(bls.stream(schema.LLM.name, inputs, schema.ANSWER, work.request_id))
        if len(responses) != 1:
            raise MiniCPMOError(f"internal error: {len(responses)} responses instead of one")
        return [bls.output(responses[0], spec) for spec in schema.ANSWER]

    def finalize(self) -> None:
        self._requests.shutdown(wait=True)
        self._in_flight.close()
        self._responder.close()
