"""Tells the thinking of an answer, between ``<think>`` and ``</think>``, from the answer itself.

The tags are single tokens. A split goes by token ids, so text that merely spells a tag stays text; vLLM's
text may lag behind its ids (a stop string may have begun), so it is held back until the tag has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minicpmo_triton.llm.increment import Increment

START_TAG = "<think>"
END_TAG = "</think>"
TURN_TAG = "<|im_start|>"


@dataclass(frozen=True)
class ThinkingTokens:
    """Ids of the tags and of the token that begins a turn."""

    start: int
    end: int
    turn: int


def begins_thinking(input_ids: NDArray[np.int32], tokens: ThinkingTokens) -> bool:
    """Whether the answer to this prompt begins inside the thinking part: its last turn opened it."""
    turns = np.flatnonzero(input_ids == tokens.turn)
    turn = input_ids[turns[-1] :] if turns.size else input_ids
    tags = turn[(turn == tokens.start) | (turn == tokens.end)]
    return bool(tags.size) and int(tags[-1]) == tokens.start


class ThinkingSplitter:
    """Splits one sequence, increment by increment; what it returns adds up to the text without its tags."""

    def __init__(self, tokens: ThinkingTokens, thinking: bool) -> None:
        self._tokens = tokens
        self._thinking = thinking
        self._pending: deque[str] = deque()  # tags whose ids have come, but not their text
        self._held = ""

    def feed(self, text: str, token_ids: Sequence[int], finished: bool = False) -> tuple[str, str]:
        """Thinking and answer in this increment; ``finished`` with the sequence's last one."""
        tokens = self._tokens
        if tokens.start in token_ids or tokens.end in token_ids:
            tags = {tokens.start: START_TAG, tokens.end: END_TAG}
            self._pending += [tags[token] for token in token_ids if token in tags]
        if not self._pending:  # the usual case
            return (text, "") if self._thinking else ("", text)
        parts: dict[bool, list[str]] = {True: [], False: []}
        rest = self._held + text
        while self._pending and (index := rest.find(self._pending[0])) >= 0:
            tag = self._pending.popleft()
            # A tag that changes nothing (a second <think>, a lone </think>) is text.
            is_text = (tag == START_TAG) == self._thinking
            parts[self._thinking].append(rest[: index + len(tag)] if is_text else rest[:index])
            self._thinking ^= not is_text
            rest = rest[index + len(tag) :]
        held = 0 if finished or not self._pending else _overlap(rest, self._pending[0])
        cut = len(rest) - held
        parts[self._thinking].append(rest[:cut])
        self._held = rest[cut:]
        return "".join(parts[True]), "".join(parts[False])


class AnswerSplitter:
    """Splits the increments of a request, with a :class:`ThinkingSplitter` for each of its sequences."""

    def __init__(self, tokens: ThinkingTokens | None, thinking: bool) -> None:
        self._tokens = tokens
        self._thinking = thinking
        self._sequences: dict[int, ThinkingSplitter] = {}

    def split(self, increment: Increment) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Thinking and answer of each sequence in ``increment``, in its order."""
        if self._tokens is None:  # the tokenizer has no such tags
            return ("",) * len(increment.texts), increment.texts
        parts = []
        for index, text, token_ids, reason in zip(
            increment.indices, increment.texts, increment.token_ids, increment.finish_reasons, strict=True
        ):
            if index not in self._sequences:
                self._sequences[index] = ThinkingSplitter(self._tokens, self._thinking)
            parts.append(self._sequences[index].feed(text, token_ids, finished=reason is not None))
        return tuple(thinking for thinking, _ in parts), tuple(answer for _, answer in parts)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
