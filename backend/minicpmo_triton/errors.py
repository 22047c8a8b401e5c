"""The one tree of errors. Each class knows the Triton code its request is answered with."""

from __future__ import annotations

from typing import ClassVar


class MiniCPMOError(Exception):
    """Base of every error the project raises on purpose.

    ``code`` is the name of the constant in ``triton_python_backend_utils.TritonError``.
    """

    code: ClassVar[str] = "INTERNAL"


class InvalidArgument(MiniCPMOError):
    """The request is wrong. ``field`` is the input (or key) at fault, e.g. ``image[1]``."""

    code = "INVALID_ARG"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[InvalidArgument], tuple[str, str]]:
        return type(self), (self.field, self.problem)


class Cancelled(MiniCPMOError):
    """The client gave the request up."""

    code = "CANCELLED"


class Unavailable(MiniCPMOError):
    """The model cannot serve at present; the message says what the operator can do."""

    code = "UNAVAILABLE"


class ConfigError(MiniCPMOError):
    """A parameter of config.pbtxt, model.json or the environment is wrong; the model's load fails."""

    code = "INVALID_ARG"


class CheckpointError(MiniCPMOError):
    """The checkpoint cannot be used: a file or a tensor is missing, unexpected or malformed."""

    code = "INTERNAL"
