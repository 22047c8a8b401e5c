"""Loops compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: ``function`` compiled at its first call, about a second, and run without Python's lock.

    Numba is imported only then: where it has been, vLLM 0.32 cannot start its engine core on a CPU, and a
    process that is spawned imports again what its parent's main module imports.
    """

    @cache
    def dispatcher() -> Callable[P, R]:
        import numba

        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return dispatcher()(*args, **kwargs)

    return call
