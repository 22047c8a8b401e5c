"""Starts a tritonserver, tells how its load goes, and leaves nothing behind when it ends.

A Python-backend stub or an engine process of vLLM can outlive a server that dies badly, and so can
the shared memory of the stubs. Each server therefore runs in a session of its own, with a
shared-memory prefix of its own; :meth:`TritonServer.stop` ends what is left of that session and
removes what is left under that prefix, and touches nothing else. Where the launcher itself is killed,
its guard process does that (:mod:`minicpmo_triton.sessions`).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from minicpmo_triton import sessions
from minicpmo_triton.errors import ConfigError, Unavailable
from minicpmo_triton.repository import derive_repository

#: Of the stack of the server's threads. Triton's HTTP endpoint copies a body onto it twice where its header
#: says that it is a form, as curl's does unless told otherwise: 4 MB ended a server with the usual 8 MB.
STACK_BYTES = 256 << 20
_LOADED = re.compile(r"successfully loaded '([^']+)'")
# A Python model's reason ends where the stub appends its traceback ("At:"), with escaped newlines.
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*?)(?:(?:\\n)+At:.*)?\"?$")


def free_ports(count: int) -> list[int]:
    """``count`` different TCP ports of the loopback interface that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def find_triton_home() -> Path:
    """The folder holding ``bin/tritonserver`` and ``backends``; :class:`ConfigError` if there is none.

    Looked for in ``TRITON_HOME``, in the repository's ``.triton`` and where the NGC container has it.
    """
    candidates = [
        Path(os.environ["TRITON_HOME"]) if "TRITON_HOME" in os.environ else None,
        Path(sys.prefix).parent / ".triton" / "pytriton" / "tritonserver",
        Path("/opt/tritonserver"),
    ]
    for home in candidates:
        if home is not None and (home / "bin" / "tritonserver").is_file():
            return home
    raise ConfigError("no tritonserver found: run `make setup`, or set TRITON_HOME to its folder")


def server_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which the Python-backend stub finds this very interpreter and its packages."""
    env = dict(base)
    library_dir = sysconfig.get_config_var("LIBDIR") or ""
    library = sysconfig.get_config_var("INSTSONAME") or ""
    if library.startswith("libpython") and ".so" in library and not (Path(library_dir) / library).exists():
        library_dir = ""  # installed elsewhere on the loader's own path
    paths = [library_dir, *env.get("LD_LIBRARY_PATH", "").split(":")]
    env["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    packages = sysconfig.get_paths()["purelib"]
    if sys.prefix != sys.base_prefix:  # the stub does not look for a virtual environment by itself
        env["VIRTUAL_ENV"] = sys.prefix
        env["PYTHONPATH"] = ":".join(p for p in (packages, env.get("PYTHONPATH", "")) if p)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with. Ports of 0 are replaced by free ones."""

    model_repository: Path
    checkpoint: str
    dtype: str = "auto"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    ready_timeout_s: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_arguments: tuple[str, ...] = ()


@contextlib.contextmanager
def _large_stacks() -> Iterator[None]:
    """While it lasts, programs start with threads of ``STACK_BYTES``, where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft == resource.RLIM_INFINITY or soft < wanted:  # without a limit, threads get 2 MB
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


class TritonServer:
    """One tritonserver process, from start to the last of its children.

    Use it as a context manager: entering starts the server and waits until every model is ready,
    leaving stops it, also when the load failed or was interrupted.
    ``on_line`` gets every line the server prints, ``on_event`` a line per step of the load.
    """

    def __init__(
        self,
        options: ServerOptions,
        on_line: Callable[[str], object] = lambda line: None,
        on_event: Callable[[str], object] = lambda line: None,
    ) -> None:
        ports = [options.http_port, options.grpc_port, options.metrics_port]
        spare = iter(free_ports(len(ports)))
        self.http_port, self.grpc_port, self.metrics_port = (port or next(spare) for port in ports)
        self.options = options
        self.tail: collections.deque[str] = collections.deque(maxlen=60)
        self._on_line = on_line
        self._on_event = on_event
        self._prefix = f"minicpmo_{os.getpid()}_{secrets.token_hex(4)}_"
        self._failures: dict[str, str] = {}
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._guard: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._scratch: Path | None = None

    @property
    def grpc_url(self) -> str:
        return f"{self.options.host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"{self.options.host}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.host}:{self.metrics_port}/metrics"

    def __enter__(self) -> TritonServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; :class:`ConfigError` if there is no tritonserver or repository."""
        home = find_triton_home()
        if not self.options.model_repository.is_dir():
            raise ConfigError(f"model repository {self.options.model_repository} does not exist")
        self._scratch = Path(tempfile.mkdtemp(prefix="minicpmo-"))
        repository = derive_repository(
            self.options.model_repository, self._scratch / "models", self.options.dtype
        )
        env = server_environment({**os.environ, **self.options.environment})
        env["MINICPMO_CHECKPOINT"] = self.options.checkpoint
        env["MINICPMO_DTYPE"] = self.options.dtype
        env.setdefault("VLLM_RPC_BASE_PATH", str(self._scratch))  # its sockets go with our folder
        env["MINICPMO_SCRATCH"] = str(self._scratch)  # and so does the engine's view of the checkpoint
        with _large_stacks():
            self._process = subprocess.Popen(
                self._command(home, repository),
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        guarded = [str(self._process.pid), self._prefix, str(self._scratch)]
        self._guard = subprocess.Popen(
            [sys.executable, "-m", sessions.__name__, *guarded],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _command(self, home: Path, repository: Path) -> list[str]:
        host = self.options.host
        return [
            str(home / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={home / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--http-address={host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={host}",
            f"--metrics-port={self.metrics_port}",
            *self.options.extra_arguments,
        ]

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self.tail.append(line.rstrip("\n"))
            self._on_line(line)
            if found := _LOADED.search(line):
                self._on_event(f"{found[1]} is loaded")
            elif found := _FAILED.search(line):
                self._failures.setdefault(found[1], found[2].strip())
            elif "Started Metrics Service" in line:  # the last endpoint to open
                self._ready.set()

    def wait_ready(self) -> None:
        """Return once every model is ready and every endpoint open.

        Raises :class:`Unavailable` with the model and its reason when the load fails or takes longer
        than ``ready_timeout_s``.
        """
        assert self._process is not None
        started = time.monotonic()
        next_sign_of_life = 10.0
        while not (self._ready.wait(0.1) and self._endpoints_open()):
            elapsed = time.monotonic() - started
            if self._process.poll() is not None:
                raise Unavailable(self._why_ended())
            if elapsed > self.options.ready_timeout_s:
                raise Unavailable(f"tritonserver was not ready after {elapsed:.0f} s")
            if elapsed >= next_sign_of_life:
                self._on_event(f"still loading, {elapsed:.0f} s")
                next_sign_of_life += 10.0

    def _endpoints_open(self) -> bool:
        """Whether every port accepts: Triton says that it has started them a moment before it has."""
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "") else self.options.host
        try:
            for port in (self.http_port, self.grpc_port, self.metrics_port):
                socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
            return False
        return True

    def _why_ended(self) -> str:
        assert self._process is not None
        assert self._reader is not None
        self._reader.join(timeout=5.0)
        reasons = [f"model {name} failed to load: {why}" for name, why in self._failures.items()]
        own = [reason for reason in reasons if "depends on" not in reason]
        return "; ".join(own or reasons) or f"tritonserver ended with code {self._process.returncode}"

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """End the server and everything it started, and remove its shared memory. Idempotent.

        A second Ctrl-C cannot cut this short: the signals are ignored until all is clean.
        """
        process, self._process = self._process, None
        with _signals_ignored():
            if process is not None:
                sessions.end_server(process.pid, self._prefix, self._scratch)
                process.wait()
            elif self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
            if self._guard is not None:
                self._guard.communicate("done\n")
                self._guard = None
            if self._reader is not None:
                self._reader.join(timeout=5.0)
                self._reader = None
            self._scratch = None


@contextlib.contextmanager
def _signals_ignored() -> collections.abc.Iterator[None]:
    """Ignore SIGINT and SIGTERM for the time of a clean-up (only the main thread can ask for that)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
