"""What the pipeline is asked: six kinds of requests, each with media of its own.

Pictures are JPEG files of smooth shading, a few discs and noise; recordings are WAV files of two tones and
noise. Both are drawn from the request's number, so that no cache helps and a run can be repeated.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from minicpmo_triton.request import RawRequest

SAMPLE_RATE = 16_000

_TEXT = "Request number {index}. In plain words, explain why the sky is blue at noon and red in the evening."


@dataclass(frozen=True)
class Kind:
    """One kind of request: at most one square picture and one recording beside the text."""

    name: str
    image_side: int = 0  # pixels
    audio_s: float = 0.0


KINDS = {
    kind.name: kind
    for kind in (
        Kind("text"),
        Kind("image-448", image_side=448),
        Kind("image-1344", image_side=1344),
        Kind("audio-5s", audio_s=5.0),
        Kind("audio-30s", audio_s=30.0),
        Kind("image-448+audio-5s", image_side=448, audio_s=5.0),
    )
}


def raw_request(kind: Kind, index: int) -> RawRequest:
    """The inputs of request ``index`` of a kind, as a client sends them."""
    random = np.random.default_rng(index)
    content: list[dict[str, str]] = []
    images, audios = [], []
    if kind.image_side:
        content.append({"type": "image"})
        images.append(jpeg(random, kind.image_side))
    if kind.audio_s:
        content.append({"type": "audio"})
        audios.append(wav(random, kind.audio_s))
    text = "Describe this." if content else _TEXT.format(index=index)
    content.append({"type": "text", "text": text})
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    return RawRequest(messages=messages, images=tuple(images), audios=tuple(audios))


def sampling_json(num_tokens: int) -> bytes:
    """Greedy, and exactly ``num_tokens`` long."""
    return json.dumps({"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}).encode()


def jpeg(random: np.random.Generator, side: int) -> bytes:
    """A square picture as a JPEG file of quality 90; about 0.3 bytes a pixel."""
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    pixels = np.stack([255 * x, 255 * y, 255 * (1 - x)], axis=-1)  # [H, W, 3]
    for _ in range(8):
        centre_x, centre_y = random.uniform(0, 1, 2)
        radius = random.uniform(0.05, 0.2)
        inside = (x - centre_x) ** 2 + (y - centre_y) ** 2 < radius**2
        pixels[inside] = random.uniform(0, 255, 3)
    pixels += random.normal(0, 6, (side, side, 1)).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def wav(random: np.random.Generator, seconds: float) -> bytes:
    """A recording at 16 kHz as a 16-bit WAV file."""
    t: NDArray[np.float64] = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * frequency * t) for frequency in random.uniform(100, 2000, 2))
    samples = 0.2 * tones + random.normal(0, 0.02, t.size)
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
