"""Between Triton's tensors and the project's arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from minicpmo_triton import schema
from minicpmo_triton.errors import InvalidArgument, MiniCPMOError

_NUMPY = {
    "STRING": np.dtype(np.object_),
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "INT32": np.dtype(np.int32),
    "UINT32": np.dtype(np.uint32),
    "FP32": np.dtype(np.float32),
}
#: Flag of the last response of a request.
FINAL: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TORCH_EMBEDS = {"TYPE_BF16": torch.bfloat16, "TYPE_FP32": torch.float32}


def read_array(request: Any, spec: schema.Tensor) -> np.ndarray[Any, Any] | None:
    """The input as an array that views the request's memory; ``None`` where it is absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
    if tensor is None:
        return None
    return tensor.as_numpy()  # type: ignore[no-any-return]


def require(request: Any, spec: schema.Tensor) -> Any:
    """The input as Triton's tensor; an absent one is :class:`InvalidArgument`."""
    tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
    if tensor is None:
        raise InvalidArgument(spec.name, "is missing")
    return tensor


def read_strings(request: Any, spec: schema.Tensor) -> tuple[bytes, ...]:
    """The elements of a string input; empty where it is absent."""
    array = read_array(request, spec)
    return () if array is None else tuple(array.reshape(-1).tolist())


def read_string(request: Any, spec: schema.Tensor) -> bytes | None:
    """The one element of a string input, ``None`` where it is absent."""
    elements = read_strings(request, spec)
    if len(elements) > 1:
        raise InvalidArgument(spec.name, f"expected one element, got {len(elements)}")
    return elements[0] if elements else None


def read_flag(request: Any, spec: schema.Tensor, default: bool) -> bool:
    """The one element of a boolean input, ``default`` where it is absent."""
    array = read_array(request, spec)
    if array is None:
        return default
    if array.size != 1:
        raise InvalidArgument(spec.name, f"expected one element, got {array.size}")
    return bool(array.reshape(-1)[0])


def output(spec: schema.Tensor, value: Any) -> Any:
    """A Triton output from an array or a sequence of values, in the data type of ``spec``."""
    return pb_utils.Tensor(spec.name, np.ascontiguousarray(value, dtype=_NUMPY[spec.dtype]))


def output_torch(spec: schema.Tensor, value: torch.Tensor) -> Any:
    """A Triton output that shares the memory of ``value``, a contiguous tensor on the CPU."""
    return pb_utils.Tensor.from_dlpack(spec.name, value)


def response(outputs: list[Any]) -> Any:
    return pb_utils.InferenceResponse(output_tensors=outputs)


def error_response(error: MiniCPMOError) -> Any:
    """The reply of a request that failed: the error's own text and Triton code."""
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def as_reply_error(error: BaseException) -> MiniCPMOError:
    """What a client may see of ``error``: ours, anything else by its type alone.

    Without the traceback, whose frames would keep the request and its tensors until the garbage collector
    comes round.
    """
    if isinstance(error, MiniCPMOError):
        return error.with_traceback(None)
    pb_utils.Logger.log_error(f"unexpected {type(error).__name__}: {error}")
    return MiniCPMOError(f"internal error ({type(error).__name__}); the server's log has the details")


def send_final(sender: Any, reply: Any) -> None:
    """Send the one and only response of a request."""
    sender.send(reply, flags=FINAL)


def model_config(args: Mapping[str, str]) -> dict[str, Any]:
    """The model's config.pbtxt as Triton hands it to ``initialize``."""
    return json.loads(args["model_config"])  # type: ignore[no-any-return]


def embeds_dtype(config: Mapping[str, Any], direction: str) -> torch.dtype:
    """The type in which embeddings travel, as config.pbtxt declares it for this model."""
    name = next(t["data_type"] for t in config[direction] if t["name"].endswith("_embeds"))
    return _TORCH_EMBEDS[name]


def torch_device(args: Mapping[str, str]) -> torch.device:
    """The device Triton placed this model instance on."""
    if args["model_instance_kind"] == "GPU":
        return torch.device("cuda", int(args["model_instance_device_id"]))
    return torch.device("cpu")
