"""What vLLM's processes need around them: environment, a record of failures, an end with their parent.

The engine core runs in a child process. Its environment is inherited, so :func:`prepare_process` and
:func:`engine_environment` act in the parent before vLLM starts, and :func:`attach` (called by vLLM in
every one of its processes, through the plugin) acts in the child.
"""

from __future__ import annotations

import contextlib
import locale
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from minicpmo_triton.llm.cpu import num_threads

FAILURE_LOG_ENV = "MINICPMO_ENGINE_FAILURE_LOG"
PLUGIN_NAME = "minicpmo_triton"
#: Of the engine's processes where there is no GPU; without it a request waited seconds on two cores.
_NICENESS_ON_A_CPU = 10

_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the stub has threads and may have a CUDA context
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # On a busy host the processes need longer to end than vLLM's 5 s; killed, they leave shared memory.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "15",
    # One request must not fill the engine by itself; the operator may raise it.
    "VLLM_MAX_N_SEQUENCES": "64",
}


def prepare_process() -> None:
    """Locale and environment for vLLM; call before the first import of it. Values already set win."""
    # Triton's Python stub starts in the C locale, in which vLLM's imports fail on non-ASCII text.
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN_NAME not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN_NAME}" if plugins else PLUGIN_NAME
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


@contextlib.contextmanager
def engine_environment(failure_log: Path) -> Iterator[None]:
    """While it lasts, processes started by vLLM report failures to ``failure_log`` and follow us."""
    import torch

    ours = {FAILURE_LOG_ENV: str(failure_log)}
    if "OMP_NUM_THREADS" not in os.environ:
        # Work on a GPU leaves the host copies of megabytes at most. Sixteen threads that meet for one of
        # them, beside the server's own, cost more than they save (docs/benchmarks.md).
        ours["OMP_NUM_THREADS"] = "1" if torch.cuda.is_available() else str(num_threads())
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_failure(failure_log: Path) -> str | None:
    """The first failure that a process of the engine reported, on one line; None without any."""
    try:
        lines = failure_log.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return lines[0] if lines else None


def attach() -> None:
    """In a process of the engine: report failures and exit when the parent does; elsewhere nothing."""
    failure_log = os.environ.get(FAILURE_LOG_ENV)
    parent = multiprocessing.parent_process()
    if failure_log is None or parent is None:
        return
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _FailureHandler) for handler in logger.handlers):
        return
    logger.addHandler(_FailureHandler(Path(failure_log)))
    _make_room_on_a_cpu()
    threading.Thread(
        target=_exit_with_parent, args=(parent.sentinel,), name="exit-with-parent", daemon=True
    ).start()


def _make_room_on_a_cpu() -> None:
    """Let the server go first: on a CPU the engine's processes compute or spin on every core there is."""
    import torch

    if not torch.cuda.is_available():
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, 0)  # a worker has inherited the engine core's
            os.setpriority(os.PRIO_PROCESS, 0, max(niceness, _NICENESS_ON_A_CPU))


def one_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _FailureHandler(logging.Handler):
    """Appends the exception of each error that vLLM logs (``EngineCore failed to start.``) to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or record.exc_info[1] is None:
            return
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(one_line(record.exc_info[1]) + "\n")


def _exit_with_parent(sentinel: int) -> None:
    # vLLM's engine core does not notice that its parent was killed and would keep the GPU's memory.
    wait([sentinel])
    os._exit(1)
