"""``minicpmo``: ask a served MiniCPM-o from the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minicpmo_client.client import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL, ChatStream, Client
from minicpmo_client.errors import MiniCPMOClientError, ServerUnavailable

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_STATUSES = "Exit status: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted."


def main(argv: Sequence[str] | None = None, make_client: Callable[..., Client] = Client) -> int:
    """Run the command line ``argv`` and return its exit status. ``make_client`` is for tests."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the chat
    try:
        with make_client(args.url, model=args.model) as client:
            status: int = args.run(client, args)
            return status
    except MiniCPMOClientError as error:
        sys.stdout.flush()
        print(f"minicpmo: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the answer has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


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


def _chat(client: Client, args: argparse.Namespace) -> int:
    timings = Timings(time.monotonic())
    request = _request(args)
    if args.no_stream:
        chat = client.chat(**request, stream=False)
        timings.add(chat.num_output_tokens, time.monotonic())
        print(chat.text)
        num_input_tokens = chat.num_input_tokens
    else:
        with client.chat(**request) as stream:
            num_input_tokens = _print_stream(stream, timings)
    if args.timings:
        print(timings.line(num_input_tokens), file=sys.stderr)
    return 0


def _print_stream(stream: ChatStream, timings: Timings) -> int:
    """Print the chunks as they come; the number of input tokens."""
    num_input_tokens = 0
    try:
        for chunk in stream:
            timings.add(chunk.num_output_tokens, time.monotonic())
            num_input_tokens = max(num_input_tokens, chunk.num_input_tokens)
            print(chunk.text, end="", flush=True)
    finally:
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


def _ready(client: Client, args: argparse.Namespace) -> int:
    if args.timeout_s > 0:
        client.wait_until_ready(args.timeout_s)
    elif not client.is_ready():
        raise ServerUnavailable(f"model {args.model} at {args.url} is not ready")
    print(f"model {args.model} at {args.url} is ready")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minicpmo", description="Ask a MiniCPM-o model that a Triton server serves.", epilog=_STATUSES
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_chat(commands)
    _add_ready(commands)
    return parser


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="ask one question and print the answer as it comes",
        description="Ask one question, with images and recordings before it, and print the answer as it "
        "comes. Ctrl-C gives the rest of the answer up.",
        epilog=_STATUSES,
    )
    chat.set_defaults(run=_chat)
    _add_server(chat)
    chat.add_argument("question", help="the question, one argument")
    path = {"action": "append", "default": [], "metavar": "PATH"}
    chat.add_argument("--image", **path, help="an image file; may be given several times, in order")
    chat.add_argument("--audio", **path, help="a recording's file; may be given several times, in order")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument(
        "--max-tokens",
        type=_positive_int,
        metavar="N",
        help="tokens of the answer, at most (default: what the model's context leaves)",
    )
    chat.add_argument(
        "--temperature",
        type=_not_negative,
        metavar="X",
        help="0 takes the likeliest token (default: the server's)",
    )
    chat.add_argument("--seed", type=int, metavar="N", help="of the sampling (default: none)")
    chat.add_argument(
        "--max-slice-nums",
        type=_positive_int,
        metavar="N",
        help="slices a large image is cut into, at most (default: the server's)",
    )
    chat.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    chat.add_argument("--no-stream", action="store_true", help="print the answer once it is complete")
    chat.add_argument(
        "--timings",
        action="store_true",
        help="print time to first token, tokens and tokens/s to stderr afterwards",
    )
    chat.add_argument(
        "--timeout-s",
        type=_positive_float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="give up unless the answer is complete after S seconds (default %(default)g)",
    )


def _add_ready(commands: Any) -> None:
    ready = commands.add_parser(
        "ready",
        help="tell whether the model is ready, or wait until it is",
        description="Tell whether the server serves the model, or wait until it does.",
        epilog=_STATUSES,
    )
    ready.set_defaults(run=_ready)
    _add_server(ready)
    ready.add_argument(
        "--timeout-s",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="wait up to S seconds (default 0: ask once)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="HOST:PORT",
        help="the server's gRPC address (default %(default)s)",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model's name (default %(default)s)")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


def _positive_float(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


# argparse names the type in its error: "invalid number value: 'x'".
for _type, _name in ((_positive_int, "number"), (_not_negative, "number"), (_positive_float, "number")):
    _type.__name__ = _name


if __name__ == "__main__":
    sys.exit(main())
