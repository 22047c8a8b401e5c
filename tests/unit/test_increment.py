"""Increments that leave together say what they said one by one."""

from __future__ import annotations

from typing import Any

from minicpmo_triton.llm.increment import Increment, merge_increments


def increment(index: int, text: str, ids: tuple[int, ...], **changed: Any) -> Increment:
    values: dict[str, Any] = {
        "indices": (index,),
        "texts": (text,),
        "token_ids": (ids,),
        "finish_reasons": (None,),
        "cumulative_logprobs": (-1.0 * len(ids),),
        "logprobs": ([{str(i): {"logprob": -1.0}} for i in ids],),
        "num_input_tokens": 5,
        "num_output_tokens": (len(ids),),
        "finished": False,
    }
    return Increment(**{**values, **changed})


def test_neighbours_of_one_sequence_become_one() -> None:
    parts = [
        increment(0, "a", (1,)),
        increment(0, "", (2,)),
        increment(0, "bc", (3, 4), finish_reasons=("stop",), cumulative_logprobs=(-4.0,), finished=True),
    ]
    [whole] = merge_increments(parts)
    assert whole == increment(
        0, "abc", (1, 2, 3, 4), finish_reasons=("stop",), cumulative_logprobs=(-4.0,), finished=True
    )


def test_sequences_are_kept_apart_and_in_order() -> None:
    parts = [
        increment(0, "a", (1,)),
        increment(1, "b", (2,)),
        increment(1, "c", (3,)),
        increment(0, "d", (4,)),
    ]
    assert [(m.indices, m.texts) for m in merge_increments(parts)] == [
        ((0,), ("a",)),
        ((1,), ("bc",)),
        ((0,), ("d",)),
    ]


def test_log_probabilities_that_were_not_asked_for_stay_absent() -> None:
    parts = [increment(0, t, (1,), logprobs=(None,), cumulative_logprobs=(None,)) for t in "ab"]
    [whole] = merge_increments(parts)
    assert whole.logprobs == (None,)


def test_nothing_and_one_are_left_alone() -> None:
    one = increment(0, "a", (1,))
    assert merge_increments([]) == []
    assert merge_increments([one])[0] is one
