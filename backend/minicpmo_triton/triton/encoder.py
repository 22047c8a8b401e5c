"""The ``vision_encoder`` and ``audio_encoder`` models: requests that wait together run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from minicpmo_triton import schema
from minicpmo_triton.checkpoint import Checkpoint, resolve_checkpoint
from minicpmo_triton.config import EncoderParameters, resolve_dtype
from minicpmo_triton.encoders.batching import AudioEncoder, AudioItem, VisionEncoder, VisionItem
from minicpmo_triton.triton import tensors
from minicpmo_triton.triton.microbatch import MicroBatcher

#: Requests that one pass takes from the queue at most.
MAX_REQUESTS = 32


@dataclass(frozen=True)
class _Job:
    item: Any  # VisionItem or AudioItem; views the memory of ``request``
    request: Any  # held so that the memory stays
    sender: Any


class _EncoderModel:
    """What both encoders share: a queue in front, one reply per request behind."""

    model: ClassVar[schema.Model]

    def initialize(self, args: Mapping[str, str]) -> None:
        config = tensors.model_config(args)
        parameters = EncoderParameters.read(config.get("parameters", {}))
        device = tensors.torch_device(args)
        dtype = getattr(torch, resolve_dtype(parameters.dtype, device.type == "cuda"))
        self._embeds_dtype = tensors.embeds_dtype(config, "output")
        checkpoint = Checkpoint(resolve_checkpoint(parameters.checkpoint))
        self._encoder = self._load(checkpoint, dtype, device)
        self._empty = torch.empty((0, self._encoder.hidden_size), dtype=self._embeds_dtype)
        self._batcher: MicroBatcher[_Job] = MicroBatcher(self.model.name, self._encode, MAX_REQUESTS)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                item = self._read(request)
            except BaseException as error:
                tensors.send_final(sender, tensors.error_response(tensors.as_reply_error(error)))
                continue
            if self._is_empty(item):  # text only: no queue, no device
                self._reply(sender, self._empty)
            else:
                self._batcher.submit(_Job(item, request, sender))

    def _encode(self, jobs: list[_Job]) -> None:
        results: Sequence[torch.Tensor | BaseException]
        try:
            results = self._encoder.encode([job.item for job in jobs])
        except BaseException as error:
            results = [error] * len(jobs)
        for job, result in zip(jobs, results, strict=True):
            self._reply(job.sender, result)

    def _reply(self, sender: Any, result: torch.Tensor | BaseException) -> None:
        try:
            if isinstance(result, BaseException):
                raise result
            embeds = result.to("cpu", self._embeds_dtype)
            reply = tensors.response([tensors.output_torch(self.model.outputs[0], embeds)])
        except BaseException as error:
            reply = tensors.error_response(tensors.as_reply_error(error))
        tensors.send_final(sender, reply)

    def finalize(self) -> None:
        self._batcher.close()

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        raise NotImplementedError

    def _read(self, request: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def _is_empty(item: VisionItem | AudioItem) -> bool:
        return all(len(array) == 0 for array in vars(item).values())


class VisionEncoderModel(_EncoderModel):
    """patches [P, 588], grid_sizes [S, 2] -> image_embeds [64 S, H]."""

    model = schema.VISION_ENCODER

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> VisionEncoder:
        return VisionEncoder.from_checkpoint(checkpoint, dtype, device)

    def _read(self, request: Any) -> VisionItem:
        return VisionItem(
            patches=tensors.require_array(request, schema.PATCHES),
            grid_sizes=tensors.require_array(request, schema.GRID_SIZES),
        )


class AudioEncoderModel(_EncoderModel):
    """mel [F, 80], mel_lengths [C] -> audio_embeds [N, H]."""

    model = schema.AUDIO_ENCODER

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> AudioEncoder:
        return AudioEncoder.from_checkpoint(checkpoint, dtype, device)

    def _read(self, request: Any) -> AudioItem:
        return AudioItem(
            mel=tensors.require_array(request, schema.MEL),
            mel_lengths=tensors.require_array(request, schema.MEL_LENGTHS),
        )
