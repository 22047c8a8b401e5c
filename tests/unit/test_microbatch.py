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
    assert batches == [[1], [10, 10], [10, 40], [1, 15], [1]]


def test_close_finishes_what_was_submitted() -> None:
    done: list[int] = []
    batcher = MicroBatcher("test", done.extend, max_batch=3)
    for job in range(100):
        batcher.submit(job)
    batcher.close()
    assert done == list(range(100))
