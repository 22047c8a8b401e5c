"""One request to the language model, checked before the engine sees anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from minicpmo_triton.compiled import compiled
from minicpmo_triton.errors import InvalidArgument

if TYPE_CHECKING:
    from minicpmo_triton.llm.sampling import Sampling

EMBEDS_DTYPES = (torch.bfloat16, torch.float32)
_BITS = {torch.bfloat16: np.int16, torch.float16: np.int16, torch.float32: np.int32}
#: All exponent bits: in NaN and infinity, and in nothing else.
_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


@dataclass(frozen=True, eq=False)
class Generation:
    """A prompt, the embeddings that replace its placeholders, and how to answer.

    T prompt tokens, N embedding rows of a modality, H the model's hidden size.
    """

    request_id: str  # the client's; may be empty or repeat
    input_ids: NDArray[np.int32]  # [T]
    image_positions: NDArray[np.int32]  # [N] index in input_ids that each row replaces
    audio_positions: NDArray[np.int32]  # [N]
    image_embeds: torch.Tensor  # [N, H] bfloat16 or float32, any device
    audio_embeds: torch.Tensor  # [N, H]
    sampling: Sampling
    stream: bool

    def embeddings(self) -> Iterator[tuple[str, NDArray[np.int32], torch.Tensor]]:
        """Modality, positions and rows of each modality."""
        yield "image", self.image_positions, self.image_embeds
        yield "audio", self.audio_positions, self.audio_embeds


@dataclass(frozen=True, eq=False)
class Prompt:
    """What vLLM takes: token ids alone, or mixed with embeddings."""

    token_ids: list[int]
    is_token_id: list[bool] | None = None  # False where embeds holds the input
    embeds: torch.Tensor | None = None  # [T, H] on the CPU, NaN and zeros where the token id counts


def validate(generation: Generation, *, hidden_size: int, vocab_size: int, max_model_len: int) -> None:
    """Raise :class:`InvalidArgument`, naming the tensor, unless the engine can take this request.

    The values of the embeddings are left to :func:`build_prompt`, which passes over them anyway.
    The engine trusts what it is given: an id or a position out of range would end its process, and
    with it every other request.
    """
    ids = generation.input_ids
    _check_int32_vector("input_ids", ids)
    if not ids.size:
        raise InvalidArgument("input_ids", "the prompt is empty")
    if ids.size >= max_model_len:
        raise InvalidArgument(
            "input_ids",
            f"the prompt has {ids.size} tokens, but the context holds {max_model_len} and at least one is "
            "needed for the answer; shorten text_input or messages, or send fewer or smaller media",
        )
    _check_range("input_ids", ids, vocab_size, "the vocabulary")
    for modality, positions, embeds in generation.embeddings():
        _check_embeds(modality, positions, embeds, hidden_size, ids.size)
    shared = np.intersect1d(generation.image_positions, generation.audio_positions)
    if shared.size:
        raise InvalidArgument("audio_positions", f"position {shared[0]} is in image_positions too")


def build_prompt(generation: Generation, dtype: torch.dtype) -> Prompt:
    """Put the embeddings of a valid request in the place of its placeholders; one pass over each row.

    Raises :class:`InvalidArgument` for a row with NaN or infinity, also one that only ``dtype`` makes so.

    vLLM's prefix cache knows a block by its token ids and all of its rows, but not by which of the two
    counts at a position, so a row of a token position begins with NaN: no row of a client does, and a
    prompt of embeddings never passes for one of text. vLLM does not compute with these rows.
    """
    ids = generation.input_ids
    token_ids = ids.tolist()
    rows = [(what, at, embeds) for what, at, embeds in generation.embeddings() if at.size]
    if not rows:
        return Prompt(token_ids)
    # numpy asks for huge pages; torch's new megabytes would come 4 KiB at a time.
    bits = np.empty((ids.size, rows[0][2].shape[1]), _BITS[dtype])
    is_token_id = np.ones(ids.size, dtype=np.bool_)
    for modality, positions, embeds in rows:
        source = np.ascontiguousarray(_bits(embeds.detach().to("cpu", dtype)))
        if not _place_rows(source, np.array(positions), bits, source.dtype.type(_EXPONENT[dtype])):
            raise InvalidArgument(f"{modality}_embeds", "holds NaN or infinity")
        is_token_id[positions] = False
    bits[is_token_id] = 0
    bits[is_token_id, 0] = _bits(torch.tensor([torch.nan], dtype=dtype))
    return Prompt(token_ids, is_token_id.tolist(), torch.from_numpy(bits).view(dtype))


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """A view as integers: numpy has no bfloat16."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile what :func:`build_prompt` runs, about a second once a process; or the first request waits."""
    one = np.zeros((1, 1), _BITS[dtype])
    _place_rows(one, np.zeros(1, np.int32), one.copy(), one.dtype.type(0))


@compiled
def _place_rows(rows, positions, out, exponent):  # type: ignore[no-untyped-def]
    """Copy each row [H] to its position; false where one holds a value with all ``exponent`` bits set."""
    finite = True
    for index in range(positions.size):
        row, target = rows[index], out[positions[index]]
        largest = rows.dtype.type(0)
        for i in range(row.size):
            target[i] = row[i]
            largest = max(largest, rows.dtype.type(row[i] & exponent))
        if largest == exponent:
            finite = False
    return finite


def engine_input(prompt: Prompt) -> Any:
    """The prompt as vLLM's AsyncLLM takes it."""
    from vllm.inputs import embeds_input, tokens_input

    if prompt.embeds is None:
        return tokens_input(prompt.token_ids)
    return embeds_input(prompt.embeds, prompt_token_ids=prompt.token_ids, is_token_ids=prompt.is_token_id)


def _check_embeds(
    modality: str, positions: NDArray[np.int32], embeds: torch.Tensor, hidden_size: int, num_tokens: int
) -> None:
    _check_int32_vector(f"{modality}_positions", positions)
    field = f"{modality}_embeds"
    if embeds.dtype not in EMBEDS_DTYPES:
        raise InvalidArgument(field, f"expected bfloat16 or float32, got {_name(embeds.dtype)}")
    if embeds.ndim != 2:
        raise InvalidArgument(field, f"expected two dimensions, got shape {list(embeds.shape)}")
    if embeds.shape[0] != positions.size:
        raise InvalidArgument(
            field, f"has {embeds.shape[0]} rows, but {modality}_positions has {positions.size} positions"
        )
    if not positions.size:
        return
    if embeds.shape[1] != hidden_size:
        raise InvalidArgument(
            field, f"rows have {embeds.shape[1]} values, the model's hidden size is {hidden_size}"
        )
    _check_range(f"{modality}_positions", positions, num_tokens, "input_ids")
    values, counts = np.unique(positions, return_counts=True)
    if values.size != positions.size:
        raise InvalidArgument(f"{modality}_positions", f"position {values[counts > 1][0]} appears twice")


def _check_int32_vector(field: str, values: NDArray[Any]) -> None:
    if values.dtype != np.int32 or values.ndim != 1:
        raise InvalidArgument(
            field, f"expected one dimension of INT32, got {values.dtype} {list(values.shape)}"
        )


def _check_range(field: str, values: NDArray[np.int32], size: int, what: str) -> None:
    outside = np.flatnonzero((values < 0) | (values >= size))
    if outside.size:
        index = int(outside[0])
        raise InvalidArgument(f"{field}[{index}]", f"{values[index]} is not in {what} (0 to {size - 1})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
