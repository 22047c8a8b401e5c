"""What a server leaves behind: processes and shared memory."""

from __future__ import annotations

import os
import signal
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from minicpmo_triton.sessions import SHARED_MEMORY

MARK = "MINICPMO_TEST_RUN"


@dataclass
class Leftovers:
    """What a run started after this object was made has left: its processes and its shared memory."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    before: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir(SHARED_MEMORY)))

    @property
    def environment(self) -> dict[str, str]:
        """Every child inherits this, whichever session it moves to."""
        return {**os.environ, MARK: self.mark}

    def processes(self) -> list[int]:
        marked = f"{MARK}={self.mark}".encode()
        return [
            int(p.name)
            for p in Path("/proc").iterdir()
            if p.name.isdigit() and marked in _read(p / "environ")
        ]

    def shared_memory(self) -> set[str]:
        """New regions that no living process maps (other servers of this machine map theirs)."""
        new = set(os.listdir(SHARED_MEMORY)) - self.before
        mapped = (
            b"".join(_read(p / "maps") for p in Path("/proc").iterdir() if p.name.isdigit()) if new else b""
        )
        return {name for name in new if f"{SHARED_MEMORY}/{name}".encode() not in mapped}

    def assert_none(self) -> None:
        deadline = time.monotonic() + 5
        while (self.processes() or self.shared_memory()) and time.monotonic() < deadline:
            time.sleep(0.1)  # a killed process takes a moment to be gone
        assert self.processes() == []
        assert self.shared_memory() == set()

    def end_processes(self) -> None:
        """Kill what is left; only ours carry the mark."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # the process has ended
