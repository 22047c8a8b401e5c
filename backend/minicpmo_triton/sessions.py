"""End what is left of a server: its processes, its shared memory, its scratch folder.

A server runs in a process session of its own, so that everything it started can be found whoever its
parent is by now. Started as a program, this module is the guard of one server: it waits until the
launcher is gone, by whatever death, and then cleans up in its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Seconds tritonserver gets to unload its models.
SERVER_TIMEOUT_S = 30.0
#: Seconds the processes it left get to end by themselves; vLLM's take a few.
CHILDREN_TIMEOUT_S = 15.0
_TRACKER_TIMEOUT_S = 5.0
_POLL_S = 0.05


def end_server(server: int, shared_memory_prefix: str, scratch: Path | None) -> None:
    """Stop the tritonserver ``server`` (the leader of its session) and remove what it leaves.

    Politely first: a tritonserver that ends by itself unloads its models, and an engine process of vLLM
    that ends by itself removes its shared memory. What does not end in time is killed, Python's
    resource trackers last, since they remove what the killed ones leave.
    """
    _end([server] if server in members(server) else [], signal.SIGTERM, SERVER_TIMEOUT_S)
    _end(_without_trackers(members(server)), signal.SIGTERM, CHILDREN_TIMEOUT_S)
    _end(_without_trackers(members(server)), signal.SIGKILL, CHILDREN_TIMEOUT_S)
    _wait(members(server), _TRACKER_TIMEOUT_S)
    _end(members(server), signal.SIGKILL, _TRACKER_TIMEOUT_S)
    for region in SHARED_MEMORY.glob(f"{shared_memory_prefix}*"):
        region.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def members(session: int) -> list[int]:
    """Process ids of the live members of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (command) state ppid pgrp session …; the command may hold spaces and brackets
            state, _, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(member_of) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


def _without_trackers(processes: list[int]) -> list[int]:
    return [pid for pid in processes if b"multiprocessing.resource_tracker" not in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _end(processes: list[int], number: signal.Signals, timeout_s: float) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    _wait(processes, timeout_s)


def _wait(processes: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(_is_alive(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def guard(server: int, shared_memory_prefix: str, scratch: Path) -> None:
    """Wait for the end of standard input: ``done`` before it means that the launcher has cleaned up."""
    if sys.stdin.readline().strip() != "done":
        end_server(server, shared_memory_prefix, scratch)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
