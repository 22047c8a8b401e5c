"""Requests that wait together run together, in order, and none is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from minicpmo_triton.triton.microbatch import MicroBatcher


def gathered(first: int, others: Sequence[int], **limits: Any) -> list[list[int]]:
    """The batches of jobs of which ``others`` come while the batch of ``first`` runs."""
    batches: list[list[int]] = []
    started, go = threading.Event(), threading.Event()

    def handle(jobs: list[int]) -> None:
        batches.append(jobs)
        started.set()
        assert go.wait(10)

    batcher = MicroBatcher("test", handle, **limits)
    batcher.submit(first)
    assert started.wait(10)
    for job in others:
        batcher.submit(job)
    go.set()
    batcher.close()
    return batches


def test_jobs_that_gather_during_a_batch_form_the_next_one() -> None:
    assert gathered(0, range(1, 7), max_batch=4) == [[0], [1, 2, 3, 4], [5, 6]]


def test_jobs_are_taken_until_they_weigh_enough() -> None:
    batches = gathered(1, (10, 10, 10, 40, 1, 15, 1), max_batch=16, weigh=lambda job: job)
    assert batches == [[1], [10, 10], [10, 1, 15], [40], [1]]  # 40 by itself


def test_close_finishes_what_was_submitted() -> None:
    done: list[int] = []
    batcher = MicroBatcher("test", done.extend, max_batch=3)
    for job in range(100):
        batcher.submit(job)
    batcher.close()
    assert done == list(range(100))


def test_light_jobs_pass_between_the_steps_of_a_heavy_one() -> None:
    done: list[str] = []
    over = threading.Event()

    def handle(jobs: list[int]) -> None:
        for step in range(jobs[0] // 10):
            if jobs == [30] and step == 1:  # all of these come while its first step runs
                for job in (1, 2, 50, 1, 3):
                    batcher.submit(job)
            if step:
                batcher.let_light_jobs_pass()
            done.append(f"step {step} of {jobs[0]}")
        done.append(f"end of {jobs}")
        if jobs == [50]:
            over.set()

    batcher = MicroBatcher("test", handle, max_batch=3, weigh=lambda job: job)
    batcher.submit(30)
    assert over.wait(10)
    batcher.close()
    assert done == [
        "step 0 of 30",
        "end of [1, 2]",
        "step 1 of 30",
        "end of [1, 3]",
        "step 2 of 30",
        "end of [30]",
        *(f"step {step} of 50" for step in range(5)),
        "end of [50]",
    ]


def test_close_during_a_heavy_job_finishes_all() -> None:
    done: list[int] = []
    started, go = threading.Event(), threading.Event()

    def handle(jobs: list[int]) -> None:
        if jobs == [9]:
            started.set()
            assert go.wait(10)
            batcher.let_light_jobs_pass()
            batcher.let_light_jobs_pass()
        done.extend(jobs)

    batcher = MicroBatcher("test", handle, max_batch=3, weigh=lambda job: job)
    batcher.submit(9)
    assert started.wait(10)
    for job in (1, 8, 2, 7):
        batcher.submit(job)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert sorted(done) == [1, 2, 7, 8, 9]
