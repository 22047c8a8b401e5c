"""What tritonserver copies between the models goes into memory that it has kept: counted in page faults."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
from benchmarks.requests import jpeg

from minicpmo_client import Client
from minicpmo_triton.launcher import TritonServer

#: A 1344x1344 picture becomes 6 MB of patches, 1,470 pages of 4 KiB; some other pages are always new.
MANY_FAULTS = 500


def page_faults(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    return int(after_name.split()[7])  # minflt in proc(5), whose fields 1 and 2 are cut off


def faults_of_pictures(server: TritonServer, client: Client, number: int) -> list[int]:
    assert server._process is not None
    marks = [page_faults(server._process.pid)]
    for seed in range(number):
        picture = jpeg(np.random.default_rng(seed), 1344)
        client.chat("Describe.", images=[picture], sampling={"max_tokens": 1}, stream=False)
        marks.append(page_faults(server._process.pid))
    return [after - before for before, after in itertools.pairwise(marks)]


def test_pictures_between_models_take_memory_that_was_freed(server: TritonServer, client: Client) -> None:
    faults = faults_of_pictures(server, client, 10)
    # The first ones fill what is kept; it settles, but not at a certain one.
    assert statistics.median(faults[5:]) < MANY_FAULTS, faults
