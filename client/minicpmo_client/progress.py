"""A sign of life while a long upload is under way."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

#: Shorter waits need no sign.
SHOW_AFTER_S = 1.0
_PERIOD_S = 0.2
_FRAMES = "|/-\\"
_CLEAR = "\r\x1b[K"


class Spinner:
    """Tells a terminal how much was handed over and for how long nothing has come back.

    Neither gRPC nor the sockets below HTTP tell how much has arrived, so no percentage is made up. Shows
    nothing where there are no media, where ``stream`` is no terminal, or before a second has passed.
    """

    def __init__(self, num_bytes: int, stream: TextIO | None = None) -> None:
        self._size = f"{num_bytes / 1e6:.1f} MB"
        self._stream = sys.stderr if stream is None else stream
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if num_bytes and self._stream.isatty():
            self._thread = threading.Thread(target=self._spin, args=(time.monotonic(),), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop and clear the line; for when something has come back."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _spin(self, started_s: float) -> None:
        if self._stopped.wait(SHOW_AFTER_S):
            return
        frame = 0
        while True:
            elapsed_s = time.monotonic() - started_s
            line = f"{_FRAMES[frame % len(_FRAMES)]} {self._size} of media on their way, {elapsed_s:.0f} s"
            self._stream.write(_CLEAR + line)
            self._stream.flush()
            frame += 1
            if self._stopped.wait(_PERIOD_S):
                break
        self._stream.write(_CLEAR)
        self._stream.flush()

    def __enter__(self) -> Spinner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
