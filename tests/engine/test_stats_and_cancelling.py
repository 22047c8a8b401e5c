"""Statistics of the real engine: what they count, prefix caching by them, and cancelling by them."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from minicpmo_triton.errors import Cancelled
from minicpmo_triton.llm.engine import Engine, EngineStats, Generation
from minicpmo_triton.llm.metrics import VLLM_METRICS
from tests.engine.conftest import StatsLog
from tests.engine.helpers import ENDLESS, TIMEOUT_S, Answer, Make, submit

BRIEF = '{"temperature": 0, "max_tokens": 8, "ignore_eos": true}'
NUM_CANCELS = 200


def is_idle(stats: EngineStats) -> bool:
    return stats.num_requests_running == 0 and stats.num_requests_waiting == 0


def answered(engine: Engine, log: StatsLog, generation: Generation) -> tuple[Answer, EngineStats]:
    """The answer to one request alone, and the statistics of it."""
    log.wait(is_idle)
    mark = log.mark()
    answer = submit(engine, generation)
    assert answer.wait() is None
    log.wait(lambda stats: is_idle(stats))
    return answer, log.since(mark)


def test_statistics_count_what_was_done(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog
) -> None:
    sampling = '{"n": 2, "seed": 1, "max_tokens": 8, "ignore_eos": true}'
    generation = make_shared("text", True, sampling)
    generation = replace(generation, input_ids=generation.input_ids[::-1].copy())  # in no cache yet
    submit(shared_engine, generation).wait()
    answer, stats = answered(shared_engine, stats_log, generation)
    num_prompt = generation.input_ids.size
    assert stats.generation_tokens == sum(len(answer.token_ids(index)) for index in (0, 1)) == 16
    assert stats.prompt_tokens == 2 * num_prompt
    assert dict(stats.finished) == {"length": 2}
    assert list(stats.request_prompt_tokens) == [num_prompt] * 2
    assert list(stats.request_generation_tokens) == [8] * 2
    assert list(stats.request_params_max_tokens) == [8] * 2
    assert 2 in stats.request_params_n
    assert len(stats.time_to_first_token) == 2
    assert len(stats.inter_token_latency) == 14
    assert sum(stats.iteration_tokens) == stats.prompt_tokens - stats.prompt_tokens_cached + 16
    for metric in VLLM_METRICS:
        if metric.name.endswith("_seconds"):
            assert all(0 <= value < 60 for value in getattr(stats, metric.field)), metric.name
    assert stats.kv_cache_usage is not None
    assert 0 <= stats.kv_cache_usage < 0.5


def test_the_same_image_and_text_are_found_in_the_prefix_cache(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog
) -> None:
    image = make_shared("image_sliced", sampling=BRIEF)
    first, _ = answered(shared_engine, stats_log, image)
    again, stats = answered(shared_engine, stats_log, image)
    assert again.token_ids() == first.token_ids()
    assert stats.prefix_cache_queries == image.input_ids.size
    block_size = 128  # vLLM's on the CPU, the largest there is: a GPU's 16 finds more
    assert stats.prefix_cache_hits >= (image.input_ids.size - 1) // block_size * block_size > 0
    assert stats.prompt_tokens_cached == stats.prefix_cache_hits
    # The same beginning with another end.
    longer = replace(image, input_ids=np.concatenate([image.input_ids, image.input_ids[-3:]]))
    _, stats = answered(shared_engine, stats_log, longer)
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("change", ["another row", "one value", "order"])
def test_another_image_under_the_same_text_is_never_found(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog, change: str
) -> None:
    image = make_shared("image_sliced", sampling=BRIEF)
    answered(shared_engine, stats_log, image)
    rows = image.image_embeds.clone()
    if change == "another row":
        rows[0] = rows[1]
    elif change == "one value":
        rows[0, -1] = torch.nextafter(rows[0, -1], torch.tensor(torch.inf))
    else:
        rows = rows.flip(0)
    _, stats = answered(shared_engine, stats_log, replace(image, image_embeds=rows))
    # The image begins in the prompt's first block.
    assert image.image_positions[0] < 16
    assert stats.prefix_cache_hits == 0


@pytest.mark.parametrize("token", [0, 3], ids=["token 0", "<unk>"])
def test_an_embedding_of_zeros_is_not_taken_for_a_token(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog, token: int
) -> None:
    """vLLM's key of a block holds ids and rows, but not which of the two counts at a position."""
    hidden = shared_engine.facts.hidden_size
    ids = np.full(400, token, np.int32)
    text = make_shared("text", sampling=BRIEF)
    first = torch.full((1, hidden), token + 0.5)  # the same in both, other than in any other test
    # Both are prompts of embeddings; from the second position on they differ in kind only.
    tokens = replace(text, input_ids=ids, image_positions=np.array([0], np.int32), image_embeds=first)
    zeros = replace(
        text,
        input_ids=ids,
        image_positions=np.arange(400, dtype=np.int32),
        image_embeds=torch.cat([first, torch.zeros(399, hidden)]),
    )
    of_tokens, _ = answered(shared_engine, stats_log, tokens)
    of_zeros, stats = answered(shared_engine, stats_log, zeros)
    assert stats.prefix_cache_hits == 0
    assert of_zeros.token_ids() != of_tokens.token_ids()
    _, stats = answered(shared_engine, stats_log, tokens)
    assert stats.prefix_cache_hits > 0


def test_cancelling_takes_effect_within_200_ms(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog, report_line: Callable[[str], None]
) -> None:
    latencies = []
    for _ in range(20):
        answer = submit(shared_engine, make_shared("text", sampling=ENDLESS))
        assert answer.first.wait(10)
        assert answer.handle is not None
        begin = time.perf_counter()
        answer.handle.cancel()
        assert isinstance(answer.wait(), Cancelled)
        latencies.append(stats_log.wait(is_idle) - begin)
    report_line(
        f"cancel to idle: median {statistics.median(latencies) * 1e3:.1f} ms, "
        f"max {max(latencies) * 1e3:.1f} ms"
    )
    assert statistics.median(latencies) < 0.2


def test_two_hundred_cancels_at_random_moments_leave_nothing_behind(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog
) -> None:
    random.seed(5)
    sampling = json.dumps({**json.loads(ENDLESS), "max_tokens": 64})
    bystander = make_shared("image_gray", sampling=sampling)
    alone = submit(shared_engine, bystander)
    assert alone.wait() is None
    generations = [make_shared(name, sampling=sampling) for name in ("text", "image_gray", "audio")]
    begun: list[tuple[float, Answer]] = []
    bystanders = []
    num_cancelled = finished = 0
    for number in range(NUM_CANCELS):
        if number % 40 == 0:
            bystanders.append(submit(shared_engine, bystander))
        begun.append(
            (
                time.monotonic() + random.choice((0, 0.001, 0.01, 0.05, 0.2)),
                submit(shared_engine, generations[number % 3]),
            )
        )
        while len(begun) > 16 or (begun and number == NUM_CANCELS - 1):
            begun.sort(key=lambda entry: entry[0])
            due, answer = begun.pop(0)
            time.sleep(max(0.0, due - time.monotonic()))
            assert answer.handle is not None
            answer.handle.cancel()
            if random.random() < 0.3:
                answer.handle.cancel()
            outcome = answer.wait()
            num_cancelled += isinstance(outcome, Cancelled)
            finished += outcome is None
    assert num_cancelled + finished == NUM_CANCELS
    assert num_cancelled > NUM_CANCELS / 2
    assert [answer.wait() for answer in bystanders] == [None] * len(bystanders)
    stats_log.wait(is_idle, timeout_s=5)
    time.sleep(0.3)
    last = stats_log.records[-1][1]
    assert is_idle(last)
    assert last.kv_cache_usage == 0
    # Other requests' answers are untouched; a near tie may go another way in another batch.
    same = sum(answer.token_ids()[:16] == alone.token_ids()[:16] for answer in bystanders)
    assert same >= len(bystanders) - 1


def test_a_cancelled_request_keeps_nothing(shared_engine: Engine, make_shared: Make) -> None:
    """Its embeddings may be many megabytes; they must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        generation = make_shared("image_gray", sampling=ENDLESS)
        embeds = weakref.ref(generation.image_embeds)
        answer = submit(shared_engine, generation)
        del generation
        assert answer.first.wait(TIMEOUT_S)
        assert answer.handle is not None
        answer.handle.cancel()
        assert isinstance(answer.wait(), Cancelled)
        deadline = time.monotonic() + TIMEOUT_S
        while embeds() is not None:
            assert time.monotonic() < deadline, "the embeddings are still there"
            time.sleep(0.01)
    finally:
        gc.enable()
