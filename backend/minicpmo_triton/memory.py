"""How this process keeps memory that it frees."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h

#: glibc's largest: an allocation beyond it is the kernel's again as soon as it is freed.
_MMAP_THRESHOLD = 32 << 20
#: Free memory at the heap's end beyond this goes back to the kernel.
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Have glibc keep memory that was freed, for allocations to come; false without glibc.

    By default memory of some megabytes may go back to the kernel when it is freed, depending on what was
    freed before, and comes again page by page: for pixels that costs as much as half of resizing them.
    With one arena the threads share what is kept, instead of each keeping some of its own. What is free
    at the heap's end beyond 512 MiB still goes back, and so does what is larger than 32 MiB. Call it
    before threads start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _KEPT_BYTES}
    for name, value in settings.items():
        mallopt(name, value)
    return True
