"""``minicpmo``: ask a served MiniCPM-o from the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minicpmo_client import commands
from minicpmo_client.client import Client
from minicpmo_client.errors import MiniCPMOClientError
from minicpmo_client.settings import DEFAULT_HTTP_URL, DEFAULT_TIMEOUT_S, DEFAULT_URL, STATS_TIMEOUT_S
from minicpmo_client.wire import DEFAULT_MODEL

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_STATUSES = (
    "Exit status: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted, 143 ended."
)


def main(argv: Sequence[str] | None = None, make_client: Callable[..., Client] = Client) -> int:
    """Run the command line ``argv`` and return its exit status. ``make_client`` is for tests."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the chat
    try:
        options = {name: vars(args)[name] for name in ("fetch_urls", "metrics_url") if vars(args).get(name)}
        with _orderly_end(), make_client(args.url, model=args.model, **options) as client:
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


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise :class:`SystemExit`, so that a chat under way is given up."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    # What is ignored, as SIGHUP under nohup, stays so.
    before = {n: signal.signal(n, end) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minicpmo", description="Ask a MiniCPM-o model that a Triton server serves.", epilog=_STATUSES
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_chat(subparsers)
    _add_embed(subparsers)
    _add_stats(subparsers)
    _add_ready(subparsers)
    return parser


def _add_chat(subparsers: Any) -> None:
    chat = subparsers.add_parser(
        "chat",
        help="ask one question and print the answer as it comes",
        description="Ask one question, with images, recordings and videos before it, and print the answer as "
        "it comes. Ctrl-C gives the rest of the answer up.",
        epilog=_STATUSES,
    )
    chat.set_defaults(run=commands.chat)
    _add_server(chat)
    chat.add_argument("question", help="the question, one argument")
    _add_media(chat, "image", "audio", "video")
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
    _add_slices(chat)
    chat.add_argument(
        "--thinking", action="store_true", help="let the model think first, and print that to stderr"
    )
    chat.add_argument("--no-stream", action="store_true", help="print the answer once it is complete")
    chat.add_argument(
        "--timings",
        action="store_true",
        help="print time to first token, tokens and tokens/s to stderr afterwards",
    )
    _add_timeout(chat, DEFAULT_TIMEOUT_S, "the answer is complete")


def _add_embed(subparsers: Any) -> None:
    embed = subparsers.add_parser(
        "embed",
        help="write the embeddings of images and recordings to a file",
        description="Write the embeddings of images and recordings, as float32 [N, hidden], to an .npz "
        "file (arrays image_0, image_1, ..., audio_0, ...) or, of a single one, to an .npy file.",
        epilog=_STATUSES,
    )
    embed.set_defaults(run=commands.embed)
    _add_server(embed)
    _add_media(embed, "image", "audio")
    _add_slices(embed)
    embed.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the file to write, .npz or .npy"
    )
    _add_timeout(embed, DEFAULT_TIMEOUT_S, "each embedding is there")


def _add_stats(subparsers: Any) -> None:
    stats = subparsers.add_parser(
        "stats",
        help="print the encoders' graph counters",
        description="Print the graph counters of every encoder instance, from the server's metrics endpoint.",
        epilog=_STATUSES,
    )
    stats.set_defaults(run=commands.stats)
    _add_server(stats)
    stats.add_argument(
        "--metrics-url",
        metavar="URL",
        help="the metrics endpoint (default: http://HOST:8002/metrics, HOST being the server's)",
    )
    stats.add_argument("--json", action="store_true", help="print JSON, with every sample of the endpoint")
    _add_timeout(stats, STATS_TIMEOUT_S, "the endpoint has answered")


def _add_ready(subparsers: Any) -> None:
    ready = subparsers.add_parser(
        "ready",
        help="tell whether the model is ready, or wait until it is",
        description="Tell whether the server serves the model, or wait until it does.",
        epilog=_STATUSES,
    )
    ready.set_defaults(run=commands.ready)
    _add_server(ready)
    ready.add_argument(
        "--timeout-s",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="wait up to S seconds (default 0: ask once)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server: HOST:PORT for gRPC, http://HOST:PORT for HTTP (default %(default)s)",
    )
    where.add_argument(
        "--http",
        action="store_const",
        dest="url",
        const=DEFAULT_HTTP_URL,
        default=DEFAULT_URL,
        help=f"the same as --url {DEFAULT_HTTP_URL}",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model's name (default %(default)s)")


_MEDIA = {"image": "an image file", "audio": "a recording's file", "video": "a video file"}


def _add_media(parser: argparse.ArgumentParser, *kinds: str) -> None:
    for kind in kinds:
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="PATH",
            help=f"{_MEDIA[kind]}; may be given several times, in order",
        )
    parser.add_argument(
        "--fetch-urls", action="store_true", help="take http(s) URLs for files too, and fetch them here"
    )


def _add_slices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-slice-nums",
        type=_positive_int,
        metavar="N",
        help="slices a large image is cut into, at most (default: the server's)",
    )


def _add_timeout(parser: argparse.ArgumentParser, default_s: float, condition: str) -> None:
    parser.add_argument(
        "--timeout-s",
        type=_positive_float,
        default=default_s,
        metavar="S",
        help=f"give up unless {condition} after S seconds (default %(default)g)",
    )


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
