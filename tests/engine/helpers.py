"""Requests of the goldens, and what their callbacks were given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.llm.engine import Engine, Generation, Handle, Increment

TIMEOUT_S = 60.0
GREEDY = '{"temperature": 0, "max_tokens": 16, "ignore_eos": true, "skip_special_tokens": false}'
ENDLESS = '{"temperature": 0, "ignore_eos": true}'

Arrays = Callable[[str], Mapping[str, np.ndarray]]
Make = Callable[..., Generation]


@dataclass
class Answer:
    """What the callbacks of one request were given, in order."""

    increments: list[Increment] = field(default_factory=list)
    outcomes: list[MiniCPMOError | None] = field(default_factory=list)
    handle: Handle | None = None
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def on_output(self, increment: Increment) -> None:
        assert not self.outcomes
        self.increments.append(increment)
        self.first.set()

    def on_done(self, outcome: MiniCPMOError | None) -> None:
        self.outcomes.append(outcome)
        self.done.set()

    def wait(self) -> MiniCPMOError | None:
        assert self.done.wait(TIMEOUT_S), "on_done was not called"
        assert len(self.outcomes) == 1
        return self.outcomes[0]

    def text(self, index: int = 0) -> str:
        return "".join(i.texts[i.indices.index(index)] for i in self.increments if index in i.indices)

    def token_ids(self, index: int = 0) -> list[int]:
        parts = (i.token_ids[i.indices.index(index)] for i in self.increments if index in i.indices)
        return [token for part in parts for token in part]

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [i.finish_reasons[i.indices.index(index)] for i in self.increments if index in i.indices]
        assert not any(reasons[:-1])
        return reasons[-1]


def submit(engine: Engine, generation: Generation) -> Answer:
    answer = Answer()
    answer.handle = engine.submit(generation, answer.on_output, answer.on_done)
    return answer


def maker(engine: Engine, goldens: Mapping[str, Any], golden_arrays: Arrays) -> Make:
    """A function that makes the generation of a golden case."""

    def make(name: str, stream: bool = True, sampling: str = GREEDY) -> Generation:
        expected = goldens[name]["expected"]
        arrays = golden_arrays(name)
        hidden = engine.facts.hidden_size
        images = arrays.get("vision_embeds", np.zeros((0, hidden), np.float32)).reshape(-1, hidden)
        clips = [arrays[f"audio_embeds_{i}"] for i in range(len(expected["audio_bounds"]))]
        ids = np.array(expected["input_ids"], np.int32)
        return Generation(
            request_id=name,
            input_ids=ids,
            image_positions=positions(expected["image_bounds"]),
            audio_positions=positions(expected["audio_bounds"]),
            image_embeds=torch.from_numpy(images),
            audio_embeds=torch.from_numpy(np.concatenate([np.zeros((0, hidden), np.float32), *clips])),
            sampling=engine.sampling(sampling, ids.size),
            stream=stream,
        )

    return make


def positions(bounds: list[list[int]]) -> Any:
    runs = [np.arange(begin, end, dtype=np.int32) for begin, end in bounds]
    return np.concatenate([np.zeros(0, np.int32), *runs])
