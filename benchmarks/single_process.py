"""The comparison: preprocess, encode the ordinary way and ask the same engine, all in one process.

What a user would write around vLLM without a server: a thread per request over the project's
preprocessing, the ordinary eager modules of :mod:`benchmarks.ordinary` one request at a time, and the
project's engine. No network, no copies between processes but the engine's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benchmarks.load import Answered, Run
from benchmarks.ordinary import OrdinaryAudio, OrdinaryVision, mel_batch, pixel_batch
from benchmarks.requests import KINDS, raw_request, sampling_json
from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.encoders.audio import AudioModule, read_audio_config
from minicpmo_triton.encoders.audio import num_tokens as num_audio_tokens
from minicpmo_triton.encoders.vision import VisionModule, read_vision_config
from minicpmo_triton.errors import MiniCPMOError
from minicpmo_triton.llm.engine import Engine, Generation, Increment
from minicpmo_triton.preprocess import Preprocessed, Preprocessor
from minicpmo_triton.request import RawRequest


class OrdinaryEncoders:
    """Both ordinary modules with a checkpoint's weights; one caller at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        vision, audio = read_vision_config(checkpoint), read_audio_config(checkpoint)
        with torch.device("meta"):  # modules that carry the checkpoint's names and shapes
            shapes = (VisionModule(*vision).state_dict(), AudioModule(*audio).state_dict())
        weights = [_weights(checkpoint, of, dtype, device) for of in shapes]
        self._vision = OrdinaryVision.of(weights[0], *vision)
        self._audio = OrdinaryAudio.of(weights[1], *audio)
        self._empty = torch.empty((0, vision[0].hidden_size), dtype=dtype)
        self._pool_step = audio[0].audio_pool_step
        self._lock = threading.Lock()

    def __call__(self, request: Preprocessed) -> tuple[Tensor, Tensor]:
        """Image and audio embeddings [N, H] on the host."""
        with self._lock, torch.inference_mode():
            return self._image_rows(request), self._audio_rows(request)

    def _image_rows(self, request: Preprocessed) -> Tensor:
        grids = [(int(rows), int(columns)) for rows, columns in request.grid_sizes]
        if not grids:
            return self._empty
        patches = torch.from_numpy(request.patches).to(self._device)
        slices = torch.split(patches, [rows * columns for rows, columns in grids])
        rows: Tensor = self._vision(pixel_batch(slices).to(self._dtype), grids)
        return rows.flatten(0, 1).cpu()

    def _audio_rows(self, request: Preprocessed) -> Tensor:
        lengths = request.mel_lengths.tolist()
        if not lengths:
            return self._empty
        chunks = torch.split(torch.from_numpy(request.mel).to(self._device), lengths)
        output = self._audio(mel_batch(chunks).to(self._dtype), lengths)
        counts = [num_audio_tokens(length, self._pool_step) for length in lengths]
        return torch.cat([rows[:count] for rows, count in zip(output, counts, strict=True)]).cpu()


def _weights(
    checkpoint: Checkpoint, like: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The checkpoint's tensors of ``like``'s names."""
    weights: dict[str, Tensor] = {}
    for prefix in dict.fromkeys(name.split(".")[0] + "." for name in like):
        expected = {n.removeprefix(prefix): tuple(t.shape) for n, t in like.items() if n.startswith(prefix)}
        found = checkpoint.load_prefix(prefix, expected, dtype, device)
        weights |= {prefix + name: tensor for name, tensor in found.items()}
    return weights


class SingleProcess:
    """Use it as a context manager: leaving stops the engine."""

    def __init__(self, checkpoint: Path, engine_args: Mapping[str, Any], dtype: str) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._preprocessor = Preprocessor(checkpoint, PreprocessParameters())
        self._encode = OrdinaryEncoders(Checkpoint(checkpoint), getattr(torch, dtype), device)
        self._engine = Engine.start(checkpoint, engine_args, dtype)

    def run(self, kind: str, concurrency: int, per_stream: int, num_tokens: int, first_index: int) -> Run:
        """As :meth:`benchmarks.load.LoadGenerator.run`, a thread for each stream."""
        raws = [raw_request(KINDS[kind], first_index + i) for i in range(concurrency * per_stream)]

        def ask_all(share: Sequence[RawRequest]) -> list[Answered]:
            return [self._ask(raw, num_tokens) for raw in share]

        with ThreadPoolExecutor(concurrency) as pool:
            shares = [raws[stream::concurrency] for stream in range(concurrency)]
            return Run([a for share in pool.map(ask_all, shares) for a in share], client_cpu_s=0.0)

    def _ask(self, raw: RawRequest, num_tokens: int) -> Answered:
        sent = time.monotonic()
        request = self._preprocessor.process(raw)
        image_embeds, audio_embeds = self._encode(request)
        generation = Generation(
            request_id="",
            input_ids=request.input_ids,
            image_positions=request.image_positions,
            audio_positions=request.audio_positions,
            image_embeds=image_embeds,
            audio_embeds=audio_embeds,
            sampling=self._engine.sampling(sampling_json(num_tokens), len(request.input_ids)),
            stream=True,
        )
        times: list[tuple[float, int]] = []
        outcome: list[MiniCPMOError | None] = []
        done = threading.Event()

        def on_output(increment: Increment) -> None:
            times.append((time.monotonic(), sum(increment.num_output_tokens)))

        def on_done(error: MiniCPMOError | None) -> None:
            outcome.append(error)
            done.set()

        self._engine.submit(generation, on_output, on_done)
        done.wait()
        if outcome[0] is not None:
            raise outcome[0]
        counted = [(at, count) for at, count in times if count]
        return Answered(sent, counted[0][0], counted[-1][0], sum(count for _, count in counted))

    def __enter__(self) -> SingleProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        self._preprocessor.close()
