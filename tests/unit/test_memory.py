"""Memory that is freed stays at hand: measured in page faults, which no other process disturbs."""

from __future__ import annotations

import os
import subprocess
import sys

FAULTS = """
import io, resource, sys
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from minicpmo_triton.media.image import decode_image
from minicpmo_triton.media.slicing import slice_image
from minicpmo_triton.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
file = io.BytesIO()
Image.new("RGB", (4000, 3000)).save(file, "JPEG")
with ThreadPoolExecutor(2) as threads, ThreadPoolExecutor(2) as pieces:
    def take():
        slice_image(decode_image("image", file.getvalue(), 10**8), 9, pool=pieces)
    for _ in range(4):
        threads.submit(take).result()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        threads.submit(take).result()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


#: Where glibc starts; it may raise them by itself, sooner or later, as allocations happen to come.
STRICT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def faults_of_a_photograph(keep: str) -> int:
    """A page is 4 KiB; 4000 x 3000 decoded pixels are 11,700 of them."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, keep],
        env={**os.environ, **STRICT},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


def test_a_photograph_takes_its_memory_from_what_was_freed() -> None:
    assert faults_of_a_photograph("keep") < 1000 < 10_000 < faults_of_a_photograph("default")
