"""Messages -> token ids, and the positions that embedding rows take among them.

A client's text may spell a control token (``<image>``, ``<|im_end|>``) and must stay text. The rendered
prompt is a plain string in which the template's tokens and a client's look alike, so the client's are
marked before rendering: a *sentinel*, a character that occurs nowhere in the request, goes behind the
first character of every spelling. What still spells a control token after rendering is the template's
own; the sentinels are taken out before the text between control tokens is encoded, with a tokenizer
that knows no control tokens. No text can therefore make a placeholder or a turn, and text without such
spellings is left as it was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minicpmo_triton.errors import CheckpointError, InvalidArgument
from minicpmo_triton.request import (
    AudioPart,
    ChatRequest,
    FramePart,
    ImagePart,
    Message,
    Part,
    SoundPart,
    TextPart,
)
from minicpmo_triton.tokenizer import ChatTemplate, TextTokenizer

IMAGE_PLACEHOLDER = "<image>./</image>"
AUDIO_PLACEHOLDER = "<audio>./</audio>"
#: An earlier answer's reasoning; the template looks for these in an assistant's message.
_THINK = re.compile("(<think>|</think>)")
# Supplementary private use: in no text that means anything, untouched by every string operation.
_SENTINELS = range(0x10FFFD, 0xEFFFF, -1)

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Prompt:
    """``text`` with a short placeholder for each image and audio clip, and the ids it expands to.

    ``input_ids`` int32 [T]; ``image_positions`` and ``audio_positions`` int32 [N], ascending: where each
    embedding row goes. There the ids are ``<unk>``.
    """

    text: str
    input_ids: Ids
    image_positions: Ids
    audio_positions: Ids


class PromptBuilder:
    """Builds prompts for one checkpoint. Safe to use from several threads.

    ``num_queries`` is the number of embedding rows of a slice.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, num_queries: int = 64) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._guard = _Guard([*tokenizer.control_ids, IMAGE_PLACEHOLDER, AUDIO_PLACEHOLDER], template.source)
        self._media = _MediaIds(tokenizer, num_queries)

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: Path, num_queries: int = 64) -> PromptBuilder:
        """Raises :class:`CheckpointError` when a tokenizer file or a control token is missing."""
        tokenizer = TextTokenizer.from_checkpoint(checkpoint_dir)
        return cls(tokenizer, ChatTemplate.from_checkpoint(checkpoint_dir), num_queries)

    def build(
        self,
        request: ChatRequest,
        slice_grids: Sequence[tuple[int, int]],
        audio_tokens: Sequence[int],
        use_image_id: bool = True,
    ) -> Prompt:
        """The prompt of ``request``.

        ``slice_grids`` has (rows, columns) of the slices of every image and video frame, (0, 0) where only
        the whole picture is encoded; ``audio_tokens`` the embedding rows of every audio clip and second of
        video sound; each in the order of the conversation, whose videos are replaced by their parts.
        ``use_image_id`` numbers the images; frames have no number. Raises :class:`InvalidArgument` when
        the template refuses the messages.
        """
        rendered, sentinel = self._render(request)
        media = self._media
        numbers = _image_ids(request, use_image_id)
        images = [media.image(number, *grid) for number, grid in zip(numbers, slice_grids, strict=True)]
        pieces = self._guard.split(rendered)
        expanded = self._expand(
            [piece.replace(sentinel, "") for piece in pieces], images, [media.audio(n) for n in audio_tokens]
        )
        return _join(rendered.replace(sentinel, ""), expanded, media.unk_id)

    def _render(self, request: ChatRequest) -> tuple[str, str]:
        """The rendered prompt with sentinels in it, and the sentinel."""
        texts = [p.text for m in request.messages for p in m.parts if isinstance(p, TextPart)]
        sentinel = self._guard.choose_sentinel(texts)
        separator = "" if request.parameters.omni_mode else "\n"
        messages = [
            {"role": m.role, "content": separator.join(self._part_text(m, p, sentinel) for p in m.parts)}
            for m in request.messages
        ]
        switches = {"enable_thinking": request.parameters.enable_thinking}
        if any(isinstance(part, AudioPart | SoundPart) for part in request.parts):
            switches["use_tts_template"] = True
        return self._template.render(messages, **switches), sentinel

    def _part_text(self, message: Message, part: Part, sentinel: str) -> str:
        if not isinstance(part, TextPart):
            return IMAGE_PLACEHOLDER if isinstance(part, ImagePart | FramePart) else AUDIO_PLACEHOLDER
        if message.role != "assistant":
            return self._guard.mark(part.text, sentinel)
        # Odd elements are the think tokens themselves, which stay real.
        segments = _THINK.split(part.text)
        segments[::2] = [self._guard.mark(segment, sentinel) for segment in segments[::2]]
        return "".join(segments)

    def _expand(self, pieces: list[str], images: list[_Block], audios: list[_Block]) -> Iterator[_Block]:
        """Text pieces at even indices, control tokens and placeholders at odd ones, as ids."""
        texts = iter(self._tokenizer.encode(pieces[::2]))
        queues = {IMAGE_PLACEHOLDER: iter(images), AUDIO_PLACEHOLDER: iter(audios)}
        for spelling in pieces[1::2]:
            yield _Block(next(texts))
            if spelling in queues:
                block = next(queues[spelling], None)
                if block is None:
                    raise CheckpointError(f"the chat template repeats {spelling}")
                yield block
            else:
                yield _Block(np.array([self._tokenizer.control_ids[spelling]], np.int32))
        yield _Block(next(texts))
        if any(next(queue, None) is not None for queue in queues.values()):
            raise CheckpointError("the chat template dropped an image or audio clip")


def _image_ids(request: ChatRequest, use_image_id: bool) -> list[int | None]:
    """The number of each image, which frames between them do not count for, and None for each frame."""
    numbers = itertools.count()
    pictures = [part for part in request.parts if isinstance(part, ImagePart | FramePart)]
    return [next(numbers) if use_image_id and isinstance(part, ImagePart) else None for part in pictures]


class _Guard:
    """Keeps the control tokens that clients spell apart from the template's."""

    def __init__(self, spellings: Sequence[str], template_source: str) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        # Only the first character is consumed, so spellings that overlap are all found.
        rests: dict[str, list[str]] = {}
        for spelling in longest_first:
            rests.setdefault(spelling[0], []).append(re.escape(spelling[1:]))
        self._starts = re.compile(
            "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        )
        self._prefixes = {spelling[:end] for spelling in spellings for end in range(1, len(spelling))}
        self._longest_prefix = max(map(len, self._prefixes))
        self._reserved = {*template_source, *"".join(spellings)}

    def choose_sentinel(self, texts: Sequence[str]) -> str:
        """A character that is in none of ``texts``, nor in the template or a control token."""
        first = chr(_SENTINELS[0])
        if first not in self._reserved and not any(first in text for text in texts):
            return first
        used = self._reserved.union(*texts)
        for code in _SENTINELS:
            if chr(code) not in used:
                return chr(code)
        raise InvalidArgument("messages", "the text uses every private-use character there is")

    def mark(self, text: str, sentinel: str) -> str:
        """``text`` with a sentinel in every spelling, and behind an end that could begin one.

        The latter because what follows, another part of the message or the template's text, could
        complete it.
        """
        marked = self._starts.sub(rf"\g<0>{sentinel}", text)
        ends = (text[-length:] for length in range(1, min(len(text), self._longest_prefix) + 1))
        return marked + sentinel if any(end in self._prefixes for end in ends) else marked

    def split(self, rendered: str) -> list[str]:
        """Text, control token, text, ..., text; the leftmost and longest token first."""
        return self._splitter.split(rendered)


@dataclass(frozen=True)
class _Block:
    """A stretch of ids, and of which kind the ``<unk>`` in it are."""

    ids: Ids
    kind: str = ""


class _MediaIds:
    """Ids of an image's and an audio clip's stretch of the prompt."""

    def __init__(self, tokenizer: TextTokenizer, num_queries: int) -> None:
        self._tokenizer = tokenizer
        self.unk_id = tokenizer.control_id("<unk>")
        self._image = self._wrapped("<image>", "</image>", num_queries)
        self._slice = self._wrapped("<slice>", "</slice>", num_queries)
        self._image_id = self._wrapped("<image_id>", "</image_id>", 0)
        self._audio = self._wrapped("<|audio_start|>", "<|audio_end|>", 0)
        (self._newline,) = tokenizer.encode(["\n"])

    def _wrapped(self, start: str, end: str, num_placeholders: int) -> Ids:
        ids = np.full(num_placeholders + 2, self.unk_id, np.int32)
        ids[0], ids[-1] = self._tokenizer.control_id(start), self._tokenizer.control_id(end)
        return ids

    def image(self, image_id: int | None, rows: int, columns: int) -> _Block:
        """The number, if any, the whole picture, then a line for each row of slices."""
        parts: list[Ids] = []
        if image_id is not None:
            (digits,) = self._tokenizer.encode([str(image_id)])
            parts += [self._image_id[:1], digits, self._image_id[1:]]
        parts.append(self._image)
        for row in range(rows):
            parts += [self._newline] * (row > 0) + [self._slice] * columns
        return _Block(np.concatenate(parts), "image")

    def audio(self, num_tokens: int) -> _Block:
        placeholders = np.full(num_tokens, self.unk_id, np.int32)
        return _Block(np.concatenate([self._audio[:1], placeholders, self._audio[1:]]), "audio")


def _join(text: str, expanded: Iterator[_Block], unk_id: int) -> Prompt:
    blocks = list(expanded)
    starts = np.cumsum([0, *(len(block.ids) for block in blocks)])

    def positions(kind: str) -> Ids:
        found = [
            start + np.flatnonzero(block.ids == unk_id)
            for start, block in zip(starts, blocks, strict=False)
            if block.kind == kind
        ]
        return np.concatenate(found, dtype=np.int32) if found else np.empty(0, np.int32)

    return Prompt(
        text, np.concatenate([block.ids for block in blocks]), positions("image"), positions("audio")
    )
