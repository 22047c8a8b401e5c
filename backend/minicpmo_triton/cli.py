"""``minicpmo-triton``: serve, check the machine, plan graphs, write checkpoints for trials."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from minicpmo_triton import __version__
from minicpmo_triton.config import DEFAULT_CHECKPOINT, DTYPES
from minicpmo_triton.errors import ConfigError, MiniCPMOError


def default_repository() -> Path:
    """The repository of a source checkout, else ``model_repository`` in the current folder."""
    checkout = Path(__file__).resolve().parents[2] / "model_repository"
    return checkout if checkout.is_dir() else Path("model_repository")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minicpmo-triton", description=__doc__)
    parser.add_argument("--version", action="version", version=f"minicpmo-triton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands)
    doctor = commands.add_parser("doctor", help="check what this machine has and say what is missing")
    doctor.set_defaults(run=_doctor)
    tiny = commands.add_parser(
        "tiny-checkpoint",
        help="write a tiny, deterministic checkpoint of the published layout, for trials and tests",
    )
    tiny.add_argument("out", type=Path, help="folder to write; made if it does not exist")
    tiny.set_defaults(run=_tiny_checkpoint)
    random = commands.add_parser(
        "random-checkpoint",
        help="write a full-size checkpoint with random encoders, for measurements on a GPU",
        description="Write a checkpoint folder of full size with random encoder weights (1.6 GB). Serve it "
        'with MINICPMO_ENGINE_ARGS=\'{"load_format": "dummy"}\', which makes a random language model.',
    )
    random.add_argument("published", type=Path, help="the published checkpoint's JSON and tokenizer files")
    random.add_argument("out", type=Path, help="folder to write; made if it does not exist")
    random.set_defaults(run=_random_checkpoint)
    _add_shapes(commands)
    return parser


def _add_shapes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    shapes = commands.add_parser(
        "shapes",
        help="say which CUDA graphs given images and recordings need",
        description="Print the graph keys that images of the given sizes and recordings of the given "
        "lengths produce, each sent alone, and how many graphs each encoder needs for all of them.",
    )
    shapes.add_argument(
        "--image", action="append", default=[], metavar="WIDTHxHEIGHT", help="in pixels; may be repeated"
    )
    shapes.add_argument(
        "--audio", action="append", default=[], metavar="SECONDS", help="at 16 kHz; may be repeated"
    )
    shapes.add_argument("--max-slice-nums", type=int, default=9, help="slices of an image (default: 9)")
    shapes.add_argument(
        "--write-warmup",
        type=Path,
        metavar="MODEL_REPOSITORY",
        help="also write the input files of a model_warmup under the encoders' folders there, and print "
        "the lines that go into their config.pbtxt",
    )
    shapes.set_defaults(run=_shapes)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="run tritonserver over the model repository until interrupted",
        description="Run tritonserver over the model repository until interrupted, and end every "
        "process it started. Arguments after -- go to tritonserver.",
    )
    serve.add_argument(
        "--checkpoint",
        default=os.environ.get("MINICPMO_CHECKPOINT", DEFAULT_CHECKPOINT),
        help="local folder or Hugging Face id (default: $MINICPMO_CHECKPOINT or %(default)s)",
    )
    serve.add_argument(
        "--dtype",
        choices=DTYPES,
        default=os.environ.get("MINICPMO_DTYPE", "auto"),
        help="auto is bfloat16 on a GPU and float32 on a CPU (default: $MINICPMO_DTYPE or %(default)s)",
    )
    serve.add_argument("--model-repository", type=Path, default=default_repository())
    serve.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    serve.add_argument("--http-port", type=int, default=8000, help="0 takes a free port (default: 8000)")
    serve.add_argument("--grpc-port", type=int, default=8001, help="0 takes a free port (default: 8001)")
    serve.add_argument("--metrics-port", type=int, default=8002, help="0 takes a free port (default: 8002)")
    serve.add_argument("--ready-timeout-s", type=float, default=900.0, help="(default: %(default)s)")
    serve.add_argument("triton_arguments", nargs="*", metavar="-- TRITON_ARGUMENT")
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from minicpmo_triton.launcher import ServerOptions, TritonServer

    options = ServerOptions(
        model_repository=arguments.model_repository,
        checkpoint=arguments.checkpoint,
        dtype=arguments.dtype,
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        ready_timeout_s=arguments.ready_timeout_s,
        extra_arguments=tuple(arguments.triton_arguments),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    server = TritonServer(options, on_line=sys.stderr.write, on_event=_say)
    with server:
        _say(f"ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}")
        code = server.wait()
        _say(f"tritonserver has ended by {_how_ended(code)}; cleaning up")
        return code if code >= 0 else 128 - code


def _how_ended(code: int) -> str:
    """In words; a negative ``code`` is the number of a signal, as subprocess has it."""
    return f"itself, with code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(f"minicpmo-triton: {line}", flush=True)


def _doctor(arguments: argparse.Namespace) -> int:
    from minicpmo_triton.doctor import run_checks

    return run_checks(_say)


def _tiny_checkpoint(arguments: argparse.Namespace) -> int:
    from minicpmo_triton.tiny_checkpoint import write_tiny_checkpoint

    write_tiny_checkpoint(arguments.out)
    _say(f"wrote {arguments.out}")
    return 0


def _random_checkpoint(arguments: argparse.Namespace) -> int:
    import torch

    from minicpmo_triton.encoders.random_weights import write_random_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_random_checkpoint(arguments.published, arguments.out, device)
    _say(f"wrote {arguments.out}")
    return 0


def _shapes(arguments: argparse.Namespace) -> int:
    from minicpmo_triton import shapes

    images = [shapes.parse_image_size(text) for text in arguments.image]
    clips = [shapes.parse_seconds(text) for text in arguments.audio]
    if not images and not clips:
        raise ConfigError("give at least one --image WIDTHxHEIGHT or --audio SECONDS")
    print(shapes.report(images, clips, arguments.max_slice_nums))
    if arguments.write_warmup:
        print(shapes.write_warmup(arguments.write_warmup, images, clips, arguments.max_slice_nums))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        _say("stopped")
        return 128 + signal.SIGINT
    except SystemExit:
        _say("stopped")
        raise
    except MiniCPMOError as error:
        print(f"minicpmo-triton: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
