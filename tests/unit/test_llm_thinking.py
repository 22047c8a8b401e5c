"""The thinking part is told apart by token ids, however the text arrives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicpmo_triton.llm.increment import Increment
from minicpmo_triton.llm.thinking import (
    AnswerSplitter,
    ThinkingSplitter,
    ThinkingTokens,
    begins_thinking,
)

START, END, TURN, WORD = 17, 18, 1, 50
TOKENS = ThinkingTokens(START, END, TURN)

Piece = tuple[int, str]


def split(pieces: list[Piece], thinking: bool = False) -> tuple[str, str]:
    """Feed a token and its text at a time."""
    splitter = ThinkingSplitter(TOKENS, thinking)
    parts = [
        splitter.feed(text, [token], finished=i == len(pieces) - 1) for i, (token, text) in enumerate(pieces)
    ]
    return "".join(a for a, _ in parts), "".join(b for _, b in parts)


@pytest.mark.parametrize(
    ("pieces", "thinking", "expected"),
    [
        (
            [(START, "<think>"), (WORD, "\nhm\n"), (END, "</think>"), (WORD, "\n\nyes")],
            False,
            ("\nhm\n", "\n\nyes"),
        ),
        ([(WORD, "hm"), (END, "</think>"), (WORD, "yes")], True, ("hm", "yes")),
        ([(START, "<think>"), (WORD, "hm")], False, ("hm", "")),
        ([(WORD, "plain")], False, ("", "plain")),
        # Text that spells a tag is text, and so is a tag that changes nothing.
        ([(WORD, "<think>a</think>b")], False, ("", "<think>a</think>b")),
        ([(END, "</think>"), (WORD, "yes")], False, ("", "</think>yes")),
        ([(START, "<think>"), (START, "<think>"), (END, "</think>"), (WORD, "x")], False, ("<think>", "x")),
        # Twice.
        (
            [(START, "<think>"), (END, "</think>"), (WORD, "a"), (START, "<think>"), (WORD, "b")],
            False,
            ("b", "a"),
        ),
    ],
)
def test_token_by_token(pieces: list[Piece], thinking: bool, expected: tuple[str, str]) -> None:
    assert split(pieces, thinking) == expected


def test_the_whole_answer_at_once() -> None:
    splitter = ThinkingSplitter(TOKENS, False)
    text = "<think>hm</think>yes"
    assert splitter.feed(text, [START, WORD, END, WORD], finished=True) == ("hm", "yes")


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 15))
def test_text_that_lags_behind_its_tokens(cuts: list[int], lag: int) -> None:
    """vLLM holds text back while a stop string may have begun; a tag's text then comes in pieces."""
    pieces = [(WORD, "a<"), (START, "<think>"), (WORD, "b</th"), (END, "</think>"), (WORD, "c<thi")]
    text = "".join(text for _, text in pieces)
    ends = list(itertools.accumulate(len(text) for _, text in pieces))
    points = sorted({min(sum(cuts[: i + 1]), len(text)) for i in range(len(cuts))} | {len(text)})
    splitter = ThinkingSplitter(TOKENS, False)
    got = ["", ""]
    begin = num_tokens = 0
    for point in points:
        # Every token whose text begins up to `lag` characters after what is shown is known already.
        known = max(
            sum(end - len(piece[1]) < point + lag for end, piece in zip(ends, pieces, strict=True)),
            num_tokens,
        )
        is_last = point == len(text)
        known = len(pieces) if is_last else known
        ids = [token for token, _ in pieces[num_tokens:known]]
        for i, part in enumerate(splitter.feed(text[begin:point], ids, finished=is_last)):
            got[i] += part
        begin, num_tokens = point, known
    assert got == ["b</th", "a<c<thi"]


def test_what_is_held_back_comes_at_the_end_at_the_latest() -> None:
    splitter = ThinkingSplitter(TOKENS, False)
    assert splitter.feed("a<th", [WORD, START]) == ("", "a")
    assert splitter.feed("", [], finished=True) == ("", "<th")  # a stop string cut the tag off


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([TURN, 5, TURN, 6], False),
        ([TURN, 5, TURN, 6, START], True),
        ([TURN, 5, TURN, 6, START, 7, END], False),  # thinking switched off by the template
        ([TURN, 5, START, TURN, 6], False),  # an earlier answer's
        ([START], True),
        ([], False),
    ],
)
def test_where_the_answer_begins(ids: list[int], expected: bool) -> None:
    assert begins_thinking(np.array(ids, np.int32), TOKENS) is expected


def increment(*sequences: tuple[int, str, tuple[int, ...], str | None]) -> Increment:
    indices, texts, token_ids, reasons = zip(*sequences, strict=True)
    nothing = (None,) * len(sequences)
    counts = tuple(map(len, token_ids))
    return Increment(indices, texts, token_ids, reasons, nothing, nothing, 3, counts, False)


def test_each_sequence_of_a_request_has_a_state_of_its_own() -> None:
    splitter = AnswerSplitter(TOKENS, thinking=False)
    first = increment((0, "<think>a", (START, WORD), None), (1, "b", (WORD,), None))
    assert splitter.split(first) == (("a", ""), ("", "b"))
    second = increment((1, "c", (WORD,), "stop"), (0, "d</think>e", (WORD, END, WORD), "stop"))
    assert splitter.split(second) == (("", "d"), ("c", "e"))


def test_without_the_tags_in_the_tokenizer_all_is_answer() -> None:
    splitter = AnswerSplitter(None, thinking=False)
    assert splitter.split(increment((0, "<think>a", (START, WORD), None))) == (("",), ("<think>a",))
