"""What the commands of ``minicpmo`` do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minicpmo_client.chat_stream import ChatStream
from minicpmo_client.client import Client
from minicpmo_client.embeddings import Embeddings
from minicpmo_client.errors import InvalidRequest, ServerUnavailable
from minicpmo_client.progress import Spinner
from minicpmo_client.stats import EncoderStats, Stats


@dataclass
class Timings:
    """When the chunks of an answer arrived, and how many tokens they held."""

    started_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_first_tokens: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int, now_s: float) -> None:
        if self.first_s is None:
            self.first_s, self.num_first_tokens = now_s, num_tokens
        self.last_s = now_s
        self.num_tokens += num_tokens

    def line(self, num_input_tokens: int) -> str:
        """One line: time to first token, tokens, and the rate at which those after the first chunk came."""
        if self.first_s is None or self.last_s is None:
            return "no token arrived"
        parts = [f"{num_input_tokens} input tokens"]
        parts.append(f"{self.num_tokens} output tokens in {self.last_s - self.started_s:.3f} s")
        num_later, seconds = self.num_tokens - self.num_first_tokens, self.last_s - self.first_s
        if seconds > 0:
            parts.insert(0, f"first token {self.first_s - self.started_s:.3f} s")
        if num_later > 0 and seconds > 0:
            parts.append(f"{num_later / seconds:.1f} tokens/s after the first chunk")
        return ", ".join(parts)


class Thoughts:
    """Prints the thinking to stderr under a heading, dimmed on a terminal, apart from the answer."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._last = ""

    def add(self, text: str) -> None:
        if not self._shown or not text:
            return
        if not self._last:
            self._write("Thinking:\n")
        self._write(text)
        self._last = text

    def end(self) -> None:
        """What follows starts on a line of its own."""
        if self._last and not self._last.endswith("\n"):
            print(file=sys.stderr, flush=True)
        self._last = ""

    @staticmethod
    def _write(text: str) -> None:
        # Undone with every piece, so that a terminal is as it was whenever the answer breaks off.
        shown = f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
        print(shown, end="", flush=True, file=sys.stderr)


def chat(client: Client, args: argparse.Namespace) -> int:
    timings = Timings(time.monotonic())
    request = _request(args)
    thoughts = Thoughts(args.thinking)
    with Spinner(_num_bytes([*args.image, *args.audio, *args.video])) as spinner:
        if args.no_stream:
            answer = client.chat(**request, stream=False)
            spinner.stop()
            timings.add(answer.num_output_tokens, time.monotonic())
            thoughts.add(answer.reasoning)
            thoughts.end()
            print(answer.text)
            num_input_tokens = answer.num_input_tokens
        else:
            with client.chat(**request) as stream:
                num_input_tokens = _print_stream(stream, timings, spinner, thoughts)
    if args.timings:
        print(timings.line(num_input_tokens), file=sys.stderr)
    return 0


def _print_stream(stream: ChatStream, timings: Timings, spinner: Spinner, thoughts: Thoughts) -> int:
    """Print the chunks as they come; the number of input tokens."""
    num_input_tokens = 0
    try:
        for chunk in stream:
            spinner.stop()
            timings.add(chunk.num_output_tokens, time.monotonic())
            num_input_tokens = max(num_input_tokens, chunk.num_input_tokens)
            thoughts.add(chunk.reasoning)
            if chunk.text:
                thoughts.end()
                print(chunk.text, end="", flush=True)
    finally:
        thoughts.end()
        # What follows a broken answer, an error's line or a prompt, starts on its own line too.
        if timings.first_s is not None:
            with contextlib.suppress(BrokenPipeError):
                print(flush=True)
    return num_input_tokens


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``Client.chat``; what was not asked for is left to the server."""
    messages: list[dict[str, Any]] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    media = [{"type": "image", "image": path} for path in args.image]
    media += [{"type": "audio", "audio": path} for path in args.audio]
    media += [{"type": "video", "video": path} for path in args.video]
    text = {"type": "text", "text": args.question}
    messages.append({"role": "user", "content": [*media, text] if media else args.question})
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    media_parameters = {"max_slice_nums": args.max_slice_nums, "enable_thinking": args.thinking or None}
    return {
        "messages": messages,
        "sampling": _given(sampling),
        "media_parameters": _given(media_parameters),
        "timeout_s": args.timeout_s,
    }


def _given(options: dict[str, Any]) -> dict[str, Any] | None:
    return {name: value for name, value in options.items() if value is not None} or None


def ready(client: Client, args: argparse.Namespace) -> int:
    if args.timeout_s > 0:
        client.wait_until_ready(args.timeout_s)
    elif not client.is_ready():
        raise ServerUnavailable(f"model {args.model} at {args.url} is not ready")
    print(f"model {args.model} at {args.url} is ready")
    return 0


def embed(client: Client, args: argparse.Namespace) -> int:
    output = Path(args.output)
    _check_output(output, len(args.image) + len(args.audio))
    parameters = _given({"max_slice_nums": args.max_slice_nums})
    with Spinner(_num_bytes([*args.image, *args.audio])):
        found = client.embed(
            images=args.image, audio=args.audio, media_parameters=parameters, timeout_s=args.timeout_s
        )
    arrays = _by_name(found)
    try:
        with output.open("wb") as file:
            if output.suffix == ".npy":
                np.save(file, next(iter(arrays.values())))
            else:
                np.savez(file, **arrays)
    except OSError as error:
        raise InvalidRequest(f"output: cannot write {args.output!r}: {error.strerror}") from None
    for (name, array), path in zip(arrays.items(), [*args.image, *args.audio], strict=True):
        print(f"{name}  {array.shape[0]} x {array.shape[1]}  {path}")
    return 0


def _check_output(output: Path, num_items: int) -> None:
    if num_items == 0:
        raise InvalidRequest("give at least one --image or --audio")
    if output.suffix not in (".npz", ".npy"):
        raise InvalidRequest(f"output: expected a name that ends in .npz or .npy, got {output.name!r}")
    if output.suffix == ".npy" and num_items > 1:
        raise InvalidRequest(f"output: .npy holds one array, and there are {num_items}; use .npz")


def _by_name(found: Embeddings) -> dict[str, Any]:
    arrays = {f"image_{index}": array for index, array in enumerate(found.images)}
    return arrays | {f"audio_{index}": array for index, array in enumerate(found.audio)}


def stats(client: Client, args: argparse.Namespace) -> int:
    snapshot = client.stats(args.timeout_s)
    print(json.dumps(_json_stats(snapshot), indent=2) if args.json else _table_of(snapshot))
    return 0


def _json_stats(snapshot: Stats) -> dict[str, Any]:
    encoders = [
        {**dataclasses.asdict(encoder), "num_misses": encoder.num_misses, "hit_rate": encoder.hit_rate}
        for encoder in snapshot.encoders
    ]
    samples = [dataclasses.asdict(s) for s in snapshot.samples if np.isfinite(s.value)]
    return {"encoders": encoders, "samples": samples}


def _table_of(snapshot: Stats) -> str:
    if not snapshot.encoders:
        return "no encoder has reported yet"
    head = ("instance", "device", "hits", "misses", "hit rate", "graphs", "static", "pool", "items")
    rows = [_row(encoder) for encoder in snapshot.encoders]
    notes = [note for encoder in snapshot.encoders for note in _notes(encoder)]
    return "\n".join([*table([head, *rows]), *notes])


def _row(encoder: EncoderStats) -> Sequence[str]:
    return (
        encoder.instance or encoder.model,
        encoder.device,
        str(encoder.graph_hits),
        str(encoder.num_misses),
        "-" if encoder.hit_rate is None else f"{encoder.hit_rate:.1%}",
        str(encoder.num_graphs),
        size_text(encoder.static_bytes),
        size_text(encoder.pool_bytes),
        str(encoder.num_items),
    )


def _notes(encoder: EncoderStats) -> Sequence[str]:
    name = encoder.instance or encoder.model
    reasons = ", ".join(f"{count} {reason}" for reason, count in encoder.graph_misses.items() if count)
    notes = [f"{name}: misses: {reasons}"] if reasons else []
    if encoder.capture_failures:
        notes.append(f"{name}: A GRAPH CAPTURE HAS FAILED; this instance refuses every call until a restart")
    return notes


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as they need to be; all but the first two to the right.

    >>> table([("name", "on", "n"), ("vision", "cpu", "12")])
    ['name    on    n', 'vision  cpu  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def size_text(num_bytes: int) -> str:
    """A number of bytes as people read it.

    >>> size_text(512), size_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _num_bytes(paths: Sequence[str]) -> int:
    """Bytes of the files among ``paths``; what cannot be told is told later, by whoever reads it."""
    num_bytes = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            num_bytes += Path(path).stat().st_size
    return num_bytes
