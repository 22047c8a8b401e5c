"""The server's threads get large stacks, whatever the limit where it is started; ours stays as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, subprocess, sys
from minicpmo_triton.launcher import _large_stacks

resource.setrlimit(resource.RLIMIT_STACK, (int(sys.argv[1]), int(sys.argv[2])))
with _large_stacks():
    subprocess.run(["bash", "-c", "ulimit -s"])
print(resource.getrlimit(resource.RLIMIT_STACK)[0])
"""
MB = 1 << 20


@pytest.mark.parametrize(
    ("soft", "hard", "expected_mb"),
    [(8 * MB, -1, 256), (-1, -1, 256), (8 * MB, 64 * MB, 64), (512 * MB, 512 * MB, 512)],
    ids=["usual", "unlimited", "hard limit", "larger already"],
)
def test_stack_limit(soft: int, hard: int, expected_mb: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(expected_mb << 10), str(soft)], done.stderr
