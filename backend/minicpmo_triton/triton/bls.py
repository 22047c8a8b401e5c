"""Asking another model of the same server (business logic scripting)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import triton_python_backend_utils as pb_utils

from minicpmo_triton import schema
from minicpmo_triton.errors import Cancelled, MiniCPMOError, Unavailable

#: Every tensor a message of :class:`InvalidArgument` may begin with.
_FIELDS = {tensor.name for model in schema.MODELS for tensor in model.inputs}
_FIELD = re.compile(r"^(\w+)[\w.\[\]]*: ")
_ENSEMBLE_PREFIX = re.compile(r"^(?:in ensemble '[^']*', )+")
#: How these errors read, by which they are known where their code is lost.
_BY_TEXT = (
    (re.compile(r"^the request was cancelled"), Cancelled),
    (re.compile(r"restart the server|start the server again|try again later"), Unavailable),
)
#: Parameter of a relayed request that holds the id under which its client knows it.
_RELAYED_ID = "relayed_id"


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


def stream(
    model: str, inputs: list[Any], outputs: Iterable[schema.Tensor], request_id: str, relayed_id: str = ""
) -> Iterator[Any]:
    """The responses of a decoupled model that carry something; raises what the model answered.

    ``relayed_id`` is the id of the request that this one is made for; a cancel may name it too.
    """
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=inputs,
        requested_output_names=[spec.name for spec in outputs],
        request_id=request_id,
        parameters={_RELAYED_ID: relayed_id} if relayed_id else {},
    )
    for response in request.exec(decoupled=True):
        _checked(response)
        if response.output_tensors():
            yield response


def relayed_id(request: Any) -> str:
    """The id of the request that this one was made for by :func:`stream`; empty where there is none."""
    parameters = request.parameters()
    return str(json.loads(parameters).get(_RELAYED_ID, "")) if _RELAYED_ID in parameters else ""


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
    # Triton 2.51 hands every error of another model over as INTERNAL. A refusal begins with the field at
    # fault and may quote its client after that, so it is looked for first.
    field = _FIELD.match(message)
    if field and field[1] in _FIELDS:
        raise RefusedRequest(message)
    for pattern, kind in _BY_TEXT:
        if pattern.search(message):
            raise kind(message)
    raise MiniCPMOError(message)
