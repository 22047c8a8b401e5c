"""Asking another model of the same server (business logic scripting)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import triton_python_backend_utils as pb_utils

from minicpmo_triton import schema
from minicpmo_triton.errors import Cancelled, MiniCPMOError, Unavailable

#: Every tensor a message of :class:`InvalidArgument` may begin with.
_FIELDS = {tensor.name for model in schema.MODELS for tensor in model.inputs}
_FIELD = re.compile(r"^(\w+)[\w.\[\]]*: ")
#: How every message of :class:`Cancelled` begins.
_CANCELLED = "the request was cancelled"
_ENSEMBLE_PREFIX = re.compile(r"^(?:in ensemble '[^']*', )+")


class RefusedRequest(MiniCPMOError):
    """The other model refused the request; its message says why."""

    code = "INVALID_ARG"


_ERRORS: dict[str, type[MiniCPMOError]] = {
    "INVALID_ARG": RefusedRequest,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
}


def inputs_of(request: Any, specs: Iterable[schema.Tensor]) -> list[Any]:
    """Those of the tensors that the request carries, to be passed on as they are."""
    found = (pb_utils.get_input_tensor_by_name(request, spec.name) for spec in specs)
    return [tensor for tensor in found if tensor is not None]


def ask(model: str, inputs: list[Any], outputs: Iterable[schema.Tensor]) -> Any:
    """One request, one response of a model that is not decoupled; raises what the model answered."""
    request = pb_utils.InferenceRequest(
        model_name=model, inputs=inputs, requested_output_names=[spec.name for spec in outputs]
    )
    return _checked(request.exec())


def stream(model: str, inputs: list[Any], outputs: Iterable[schema.Tensor], request_id: str) -> Iterator[Any]:
    """The responses of a decoupled model that carry something; raises what the model answered."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=inputs,
        requested_output_names=[spec.name for spec in outputs],
        request_id=request_id,
    )
    for response in request.exec(decoupled=True):
        _checked(response)
        if response.output_tensors():
            yield response


def output(response: Any, spec: schema.Tensor) -> Any:
    """The tensor of a response; an error of the model that left it out."""
    tensor = pb_utils.get_output_tensor_by_name(response, spec.name)
    if tensor is None:
        raise MiniCPMOError(f"internal error: a response without {spec.name}")
    return tensor


def _checked(response: Any) -> Any:
    if not response.has_error():
        return response
    error = response.error()
    message = _ENSEMBLE_PREFIX.sub("", error.message())
    for name, kind in _ERRORS.items():
        if error.code() == getattr(pb_utils.TritonError, name):
            raise kind(message)
    # Triton 2.51 hands every error of another model over as INTERNAL; ours begin with the field at fault.
    if message.startswith(_CANCELLED):
        raise Cancelled(message)
    field = _FIELD.match(message)
    raise RefusedRequest(message) if field and field[1] in _FIELDS else MiniCPMOError(message)
