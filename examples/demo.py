"""The main job, start to end: serve, ask about a picture and a recording, print the answer, stop.

Without arguments it serves a tiny checkpoint that it writes itself, so the answer is made of random
tokens; what it shows is that every part runs. ``--checkpoint`` takes the real one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import torch

from minicpmo_client import Client, MiniCPMOClientError
from minicpmo_triton.cli import default_repository
from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.launcher import ServerOptions, TritonServer
from minicpmo_triton.tiny_checkpoint import write_tiny_checkpoint

MEDIA = Path(__file__).parent / "media"
QUESTION = "What do you see, and what is said?"


def say(line: str) -> None:
    print(f"demo: {line}", flush=True)


@contextmanager
def checkpoint_folder(given: str | None) -> Iterator[str]:
    """The checkpoint that was asked for, or a tiny one that is removed afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="minicpmo-tiny-") as folder:
        write_tiny_checkpoint(Path(folder))
        say("wrote a tiny checkpoint with random weights; expect random words")
        yield folder


def ask(url: str, max_tokens: int) -> None:
    """Stream one answer and print when it began and how fast it came."""
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": MEDIA / "astronaut.jpg"},
                {"type": "audio", "audio": MEDIA / "speech.wav"},
                {"type": "text", "text": QUESTION},
            ],
        }
    ]
    say(f"astronaut.jpg, speech.wav, {QUESTION!r}")
    started = time.perf_counter()
    first: float | None = None
    num_input, num_output = 0, 0
    with (
        Client(url) as client,
        client.chat(messages, sampling={"max_tokens": max_tokens, "seed": 0}) as answer,
    ):
        for chunk in answer:
            first = first or time.perf_counter() - started
            num_input, num_output = chunk.num_input_tokens, num_output + chunk.num_output_tokens
            print(chunk.text, end="", flush=True)
    total = time.perf_counter() - started
    print(flush=True)
    say(
        f"{num_input} prompt positions, first token after {1000 * (first or total):.0f} ms, "
        f"{num_output} tokens in {1000 * total:.0f} ms"
    )


def environment() -> dict[str, str]:
    """On a CPU, start without compiling the language model: that takes a minute and gains nothing here."""
    if torch.cuda.is_available() or "MINICPMO_ENGINE_ARGS" in os.environ:
        return {}
    return {"MINICPMO_ENGINE_ARGS": json.dumps({"enforce_eager": True, "max_model_len": 8192})}


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(checkpoint: str | None, max_tokens: int) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint_folder(checkpoint))
        options = ServerOptions(
            default_repository(), folder, http_port=0, grpc_port=0, metrics_port=0, environment=environment()
        )
        server = TritonServer(options, on_event=say)
        say("starting tritonserver (about half a minute)")
        started = time.perf_counter()
        try:
            stack.enter_context(server)
        except MiniCPMOError:
            print("\n".join(server.tail), file=sys.stderr)
            raise
        say(f"every model is ready after {time.perf_counter() - started:.0f} s")
        ask(server.grpc_url, max_tokens)
        say("stopping the server")
    say("done")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="folder or Hugging Face id (default: a tiny one, made here)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of the answer (default: 32)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run(arguments.checkpoint, arguments.max_tokens)
    except KeyboardInterrupt:
        say("interrupted; the server is stopped")
        return 130
    except (MiniCPMOError, MiniCPMOClientError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
