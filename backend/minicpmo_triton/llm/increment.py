"""What the engine answers, in the project's own terms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import RequestOutput

#: JSON has no infinity; vLLM's server writes this for a probability of zero.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True)
class Increment:
    """A part of an answer, or all of it; the tuples run over the sequences that it concerns.

    With ``stream`` each increment has only what is new (``cumulative_logprobs`` run from the start);
    without it there is one, with everything.
    """

    indices: tuple[int, ...]  # of the sequences, 0 to n - 1
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str | None, ...]  # "stop", "length", …; None while the sequence goes on
    cumulative_logprobs: tuple[float | None, ...]  # None unless logprobs were asked for
    logprobs: tuple[list[dict[str, dict[str, Any]]] | None, ...]  # per token: {token id: {…}}, for JSON
    num_input_tokens: int
    num_output_tokens: tuple[int, ...]
    finished: bool  # the last one of the request


def to_increment(output: RequestOutput, num_input_tokens: int) -> Increment:
    """Convert vLLM's output."""
    sequences = output.outputs
    return Increment(
        indices=tuple(sequence.index for sequence in sequences),
        texts=tuple(sequence.text for sequence in sequences),
        token_ids=tuple(tuple(sequence.token_ids) for sequence in sequences),
        finish_reasons=tuple(sequence.finish_reason for sequence in sequences),
        cumulative_logprobs=tuple(sequence.cumulative_logprob for sequence in sequences),
        logprobs=tuple(_logprobs(sequence.logprobs) for sequence in sequences),
        num_input_tokens=num_input_tokens,
        num_output_tokens=tuple(len(sequence.token_ids) for sequence in sequences),
        finished=output.finished,
    )


def merge_increments(increments: Sequence[Increment]) -> list[Increment]:
    """The same answer in fewer increments: neighbours that concern the same sequences become one."""
    merged: list[Increment] = []
    for _, group in itertools.groupby(increments, key=lambda increment: increment.indices):
        parts = list(group)
        merged.append(parts[0] if len(parts) == 1 else _join(parts))
    return merged


def _join(parts: Sequence[Increment]) -> Increment:
    def of_each(name: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(getattr(part, name) for part in parts), strict=True)

    return replace(
        parts[-1],  # reasons, cumulative log-probabilities and ``finished`` are those of the last
        texts=tuple("".join(texts) for texts in of_each("texts")),
        token_ids=tuple(tuple(itertools.chain(*ids)) for ids in of_each("token_ids")),
        logprobs=tuple(
            None if entries[0] is None else list(itertools.chain(*entries)) for entries in of_each("logprobs")
        ),
        num_output_tokens=tuple(sum(counts) for counts in of_each("num_output_tokens")),
    )


def _logprobs(tokens: Sequence[Mapping[int, Any]] | None) -> list[dict[str, dict[str, Any]]] | None:
    if tokens is None:
        return None
    return [
        {
            str(token_id): {
                "logprob": max(entry.logprob, MIN_LOGPROB),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in token.items()
        }
        for token in tokens
    ]
