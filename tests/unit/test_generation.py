"""A generation is checked before the engine sees it, and its prompt is built with one copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.llm.generation import Generation, build_prompt, validate

HIDDEN = 4


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def generation(**changes: Any) -> Generation:
    """Six tokens; rows of an image replace 1 and 2, one of audio replaces 4."""
    good = Generation(
        request_id="",
        input_ids=ints(5, 3, 3, 6, 3, 7),
        image_positions=ints(2, 1),
        audio_positions=ints(4),
        image_embeds=torch.arange(8, dtype=torch.float32).reshape(2, HIDDEN) + 1,
        audio_embeds=torch.full((1, HIDDEN), 9.0),
        sampling=None,  # type: ignore[arg-type]  # only the engine reads it
        stream=False,
    )
    return replace(good, **changes)


def check(candidate: Generation) -> None:
    validate(candidate, hidden_size=HIDDEN, vocab_size=10, max_model_len=8)


def test_rows_go_to_their_positions_and_no_other_row_can_be_a_clients() -> None:
    candidate = generation()
    check(candidate)
    prompt = build_prompt(candidate, torch.bfloat16)
    assert prompt.token_ids == [5, 3, 3, 6, 3, 7]
    assert prompt.is_token_id == [True, False, False, True, False, True]
    assert prompt.embeds is not None
    assert prompt.embeds.dtype == torch.bfloat16
    assert prompt.embeds[[1, 2, 4], 0].tolist() == [5.0, 1.0, 9.0]
    others = prompt.embeds[[0, 3, 5]]
    assert others[:, 0].isnan().all()  # which build_prompt refuses in a client's row
    assert not others[:, 1:].any()  # never uninitialised: vLLM's prefix cache hashes them


def test_a_prompt_of_text_has_no_embeddings() -> None:
    empty = torch.zeros(0, 0)
    candidate = generation(
        image_positions=ints(), audio_positions=ints(), image_embeds=empty, audio_embeds=empty
    )
    check(candidate)
    prompt = build_prompt(candidate, torch.float32)
    assert (prompt.is_token_id, prompt.embeds) == (None, None)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"input_ids": ints()}, "input_ids", "empty"),
        ({"input_ids": np.arange(6)}, "input_ids", "INT32"),
        ({"input_ids": ints(1, 2).reshape(1, 2)}, "input_ids", "one dimension"),
        ({"input_ids": ints(5, 3, 3, 6, 3, 10)}, "input_ids[5]", "10 is not in the vocabulary"),
        ({"input_ids": ints(-1, 3, 3, 6, 3, 7)}, "input_ids[0]", "-1 is not in"),
        ({"image_positions": ints(1)}, "image_embeds", "has 2 rows, but image_positions has 1"),
        ({"image_positions": ints(1, 6)}, "image_positions[1]", "6 is not in input_ids"),
        ({"image_positions": ints(-1, 1)}, "image_positions[0]", "-1 is not in input_ids"),
        ({"image_positions": ints(1, 1)}, "image_positions", "position 1 appears twice"),
        ({"audio_positions": ints(2)}, "audio_positions", "position 2 is in image_positions too"),
        ({"audio_positions": np.array([4.0])}, "audio_positions", "INT32"),
        ({"audio_embeds": torch.ones(1, HIDDEN + 1)}, "audio_embeds", "hidden size is 4"),
        ({"audio_embeds": torch.ones(HIDDEN)}, "audio_embeds", "two dimensions"),
        ({"audio_embeds": torch.ones(1, HIDDEN, dtype=torch.float64)}, "audio_embeds", "got float64"),
    ],
)
def test_what_would_hurt_the_engine_is_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(generation(**changes))
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, HIDDEN - 1])
def test_a_row_that_is_not_finite_is_refused(
    dtype: torch.dtype, sent: torch.dtype, value: float, at: int
) -> None:
    rows = torch.ones(2, HIDDEN, dtype=sent)
    rows[1, at] = value
    candidate = generation(image_embeds=rows)
    check(candidate)
    with pytest.raises(InvalidArgument, match="image_embeds: holds NaN or infinity"):
        build_prompt(candidate, dtype)


def test_large_finite_rows_are_no_infinity_unless_the_engines_type_makes_them_so() -> None:
    largest = torch.finfo(torch.float32).max
    candidate = generation(audio_embeds=torch.full((1, HIDDEN), -largest))
    embeds = build_prompt(candidate, torch.float32).embeds
    assert embeds is not None
    assert embeds[4].tolist() == [-largest] * HIDDEN
    with pytest.raises(InvalidArgument, match="audio_embeds: holds NaN or infinity"):
        build_prompt(candidate, torch.bfloat16)  # rounds to infinity


def test_rows_need_not_lie_side_by_side() -> None:
    rows = torch.arange(4 * HIDDEN, dtype=torch.bfloat16).reshape(2, 2 * HIDDEN)[:, ::2]
    embeds = build_prompt(generation(image_embeds=rows), torch.bfloat16).embeds
    assert embeds is not None
    torch.testing.assert_close(embeds[[2, 1]], rows)


def test_a_prompt_needs_room_for_one_token_of_the_answer() -> None:
    check(generation(input_ids=np.full(7, 3, np.int32)))
    with pytest.raises(InvalidArgument, match=r"input_ids: the prompt has 8 tokens, but the context holds 8"):
        check(generation(input_ids=np.full(8, 3, np.int32)))
