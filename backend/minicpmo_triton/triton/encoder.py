"""The ``vision_encoder`` and ``audio_encoder`` models: requests that wait together run together."""

from __future__ import annotations

import contextlib
import locale
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from minicpmo_triton import schema
from minicpmo_triton.checkpoint import Checkpoint, resolve_checkpoint
from minicpmo_triton.config import EncoderParameters, resolve_dtype
from minicpmo_triton.encoders.batching import MAX_BATCH, AudioEncoder, AudioItem, VisionEncoder, VisionItem
from minicpmo_triton.encoders.timing import CallTime, TimedForward
from minicpmo_triton.errors import InvalidArgument, MiniCPMOError
from minicpmo_triton.graphs.adapter import REMEDY, GraphAdapter
from minicpmo_triton.graphs.device import Forward
from minicpmo_triton.graphs.policy import GraphSettings
from minicpmo_triton.graphs.stats import GraphStats
from minicpmo_triton.triton import tensors
from minicpmo_triton.triton.metrics import EncoderMetrics, RequestMetrics
from minicpmo_triton.triton.microbatch import MicroBatcher

#: Passes whose metrics are published together at most.
MAX_MERGED_PASSES = 64


@dataclass(frozen=True)
class _Job:
    item: Any  # VisionItem or AudioItem; views the memory of ``request``
    num_pieces: int  # slices or chunks
    request: Any  # held so that the memory stays
    sender: Any
    arrived: float  # perf_counter


@dataclass(frozen=True)
class _Report:
    """What one pass leaves for the metrics."""

    stats: GraphStats  # totals after it
    static_bytes: int
    pool_bytes: int
    calls: Sequence[CallTime] = ()
    num_items: int = 0
    waits: Sequence[tuple[float, float]] = ()  # of each request: in the queue, until its answer; seconds


class _EncoderModel:
    """What both encoders share: a queue in front, a graph adapter inside, one reply per request behind.

    The worker thread of the queue is the only one that touches the device.
    """

    model: ClassVar[schema.Model]

    def initialize(self, args: Mapping[str, str]) -> None:
        with contextlib.suppress(locale.Error):  # the stub's C locale breaks vLLM's imports
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        config = tensors.model_config(args)
        parameters = EncoderParameters.read(config.get("parameters", {}))
        self._settings = GraphSettings.from_parameters(parameters)
        self._device = tensors.torch_device(args)
        if self._device.type == "cuda":
            torch.set_num_threads(1)  # the host only copies; threads that meet for that cost more
        self._metrics = EncoderMetrics(args["model_name"], args["model_instance_name"], str(self._device))
        self._request_metrics = RequestMetrics(args["model_name"], args["model_instance_name"])
        dtype = getattr(torch, resolve_dtype(parameters.dtype, self._device.type == "cuda"))
        self._embeds_dtype = tensors.embeds_dtype(config, "output")
        checkpoint = Checkpoint(resolve_checkpoint(parameters.checkpoint))
        self._encoder = self._load(checkpoint, dtype)
        self._empty = torch.empty((0, self._encoder.hidden_size), dtype=self._embeds_dtype)
        # Each figure is a call to the server; the thread that feeds the device does not wait for them.
        self._reports: MicroBatcher[_Report] = MicroBatcher("metrics", self._publish, MAX_MERGED_PASSES)
        self._publish([self._report()])
        # One captured batch of the largest size at a time: its requests are answered before the next runs. A
        # request of more than that, a video or an hour of sound, takes turns with the others.
        self._step: torch.cuda.Event | None = None  # the end of such a request's last batch
        self._batcher: MicroBatcher[_Job] = MicroBatcher(
            self.model.name, self._encode, MAX_BATCH, weigh=lambda job: job.num_pieces
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                rows, sizes = (tensors.require(request, spec).as_numpy() for spec in self.model.inputs)
            except BaseException as error:
                tensors.send_final(sender, tensors.error_response(tensors.as_reply_error(error)))
                continue
            if len(rows) == len(sizes) == 0:  # text only: no queue, no device
                self._reply(sender, self._empty)
            else:
                self._batcher.submit(
                    _Job(self._item(rows, sizes), len(sizes), request, sender, time.perf_counter())
                )

    def is_ready(self) -> bool:
        """Asked by the Triton versions that do: false once a capture has failed."""
        return self._adapter.failed is None

    def finalize(self) -> None:
        self._batcher.close()
        self._reports.close()

    def _wrap(self, forward: Forward) -> Forward:
        self._adapter = GraphAdapter(
            forward, self._settings, self._device, on_capture=self._metrics.observe_capture
        )
        self._timed = TimedForward(self._adapter, self._device, self._adapter.get_cumulative_stats)
        return self._timed

    def _encode(self, jobs: list[_Job]) -> None:
        """Answer every job of one pass; an unexpected error costs only the job it belongs to."""
        started = time.perf_counter()
        try:
            embeds = self._encode_to_host(jobs)
        except BaseException as error:
            if len(jobs) > 1 and self._adapter.failed is None:
                for job in jobs:
                    self._encode([job])
                return
            embeds = [self._explain(error)] * len(jobs)
        for job, result in zip(jobs, embeds, strict=True):
            self._reply(job.sender, result)
        answered = time.perf_counter()
        try:
            report = self._report(
                calls=self._timed.take(),
                num_items=sum(job.num_pieces for job, r in zip(jobs, embeds, strict=True) if _succeeded(r)),
                waits=[(started - job.arrived, answered - job.arrived) for job in jobs],
            )
        except Exception as error:  # of a device that has failed: this thread has others' requests to refuse
            tensors.as_reply_error(error)
        else:
            self._reports.submit(report)

    def _encode_to_host(self, jobs: list[_Job]) -> list[torch.Tensor | MiniCPMOError]:
        """Every request's rows on the host: copies side by side, and one wait for all of them."""
        embeds: list[torch.Tensor | MiniCPMOError] = []
        between = self._let_others_pass if jobs[0].num_pieces > MAX_BATCH else None
        for rows in self._encoder.encode([job.item for job in jobs], between):
            if isinstance(rows, InvalidArgument):
                embeds.append(rows)
            elif self._device.type == "cpu":
                embeds.append(rows.to(self._embeds_dtype))
            else:
                host = torch.empty(rows.shape, dtype=self._embeds_dtype, pin_memory=True)
                embeds.append(host.copy_(rows.to(self._embeds_dtype), non_blocking=True))
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()
        return embeds

    def _let_others_pass(self) -> None:
        """Between two batches of a large request: encode small ones that have come meanwhile."""
        if self._device.type == "cuda":
            # The host is far ahead of the device: what it starts now would wait for all it has started. One
            # batch stays under way, so that the device never waits for the next.
            step = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.record(torch.cuda.current_stream(self._device))
            previous, self._step = self._step, step
            if previous is not None:
                previous.synchronize()
        self._batcher.let_light_jobs_pass()

    def _explain(self, error: BaseException) -> MiniCPMOError:
        if self._adapter.failed is error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return MiniCPMOError(f"{self.model.name}: capturing a CUDA graph failed ({what}); {REMEDY}")
        return tensors.as_reply_error(error)

    def _report(self, **of_the_pass: Any) -> _Report:
        adapter = self._adapter
        return _Report(
            adapter.get_cumulative_stats(), adapter.static_bytes, adapter.pool_bytes, **of_the_pass
        )

    def _publish(self, reports: list[_Report]) -> None:
        latest = reports[-1]
        self._metrics.publish(latest.stats, latest.static_bytes, latest.pool_bytes)
        self._metrics.add_items(sum(report.num_items for report in reports))
        for report in reports:
            for call in report.calls:
                self._metrics.observe_call("graph" if call.by_graph else "eager", call.seconds)
            for queued, total in report.waits:
                self._request_metrics.observe(queued, total)

    def _reply(self, sender: Any, result: torch.Tensor | MiniCPMOError) -> None:
        if isinstance(result, MiniCPMOError):
            reply = tensors.error_response(result)
        else:
            reply = tensors.response([tensors.output_torch(self.model.outputs[0], result)])
        tensors.send_final(sender, reply)

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> VisionEncoder | AudioEncoder:
        raise NotImplementedError

    def _item(self, rows: Any, sizes: Any) -> VisionItem | AudioItem:
        raise NotImplementedError


def _succeeded(result: torch.Tensor | MiniCPMOError) -> bool:
    return isinstance(result, torch.Tensor)


class VisionEncoderModel(_EncoderModel):
    """patches [P, 588], grid_sizes [S, 2] -> image_embeds [64 S, H]."""

    model = schema.VISION_ENCODER

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> VisionEncoder:
        return VisionEncoder.from_checkpoint(checkpoint, dtype, self._device, self._wrap)

    def _item(self, rows: Any, sizes: Any) -> VisionItem:
        return VisionItem(patches=rows, grid_sizes=sizes)


class AudioEncoderModel(_EncoderModel):
    """mel [F, 80], mel_lengths [C] -> audio_embeds [N, H]."""

    model = schema.AUDIO_ENCODER

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> AudioEncoder:
        return AudioEncoder.from_checkpoint(checkpoint, dtype, self._device, self._wrap)

    def _item(self, rows: Any, sizes: Any) -> AudioItem:
        return AudioItem(mel=rows, mel_lengths=sizes)
