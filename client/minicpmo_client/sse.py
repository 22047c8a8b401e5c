"""Server-sent events, as far as Triton sends them: the data of each event, however the bytes are cut."""

from __future__ import annotations


class EventParser:
    """Splits a stream of bytes into the data of its events.

    Lines end in LF or CR LF, an empty line ends an event; other fields than ``data`` are passed over.

    >>> parser = EventParser()
    >>> parser.feed(b'data: {"a": 1}\\n\\nda'), parser.feed(b'ta: {}\\n\\n')
    ([b'{"a": 1}'], [b'{}'])
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that ``data`` completes."""
        if b"\n" not in data:  # a long line arrives in pieces: do not scan it again for each
            self._rest += data
            return []
        *lines, rest = bytes(self._rest + data).split(b"\n")
        self._rest = bytearray(rest)
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
