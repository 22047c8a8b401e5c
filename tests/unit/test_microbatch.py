"""Requests that wait together run together, in order, and none is lost."""

from __future__ import annotations

import threading

from minicpmo_triton.triton.microbatch import MicroBatcher


def test_jobs_that_gather_during_a_batch_form_the_next_one() -> None:
    batches: list[list[int]] = []
    started, go = threading.Event(), threading.Event()

    def handle(jobs: list[int]) -> None:
        batches.append(jobs)
        started.set()
        assert go.wait(10)

    batcher = MicroBatcher("test", handle, max_batch=4)
    batcher.submit(0)
    assert started.wait(10)
    for job in range(1, 7):
        batcher.submit(job)
    go.set()
    batcher.close()
    assert batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_jobs_are_taken_until_they_weigh_enough() -> None:
    batches: list[list[int]] = []
    started, go = threading.Event(), threading.Event()

    def handle(jobs: list[int]) -> None:
        batches.append(jobs)
        started.set()
        assert go.wait(10)

    batcher = MicroBatcher("test", handle, max_batch=16, weigh=lambda job: job)
    batcher.submit(1)
    assert started.wait(10)
    for job in (10, 10, 10, 40, 1, 15, 1):
        batcher.submit(job)
    go.set()
    batcher.close()
    assert batches == [[1], [10, 10], [10, 40], [1, 15], [1]]


def test_close_finishes_what_was_submitted() -> None:
    done: list[int] = []
    batcher = MicroBatcher("test", done.extend, max_batch=3)
    for job in range(100):
        batcher.submit(job)
    batcher.close()
    assert done == list(range(100))
