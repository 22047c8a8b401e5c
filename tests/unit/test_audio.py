"""Decoding to 16 kHz mono, Whisper's log-mel as the goldens, chunks and refusals."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.audio import decode_audio, log_mel, log_mel_chunks, num_audio_tokens

TONE = (0.3 * np.sin(np.arange(48_000) * 0.05)).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = 16_000, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **({"format": "WAV", "subtype": "FLOAT"} | options))
    return file.getvalue()


@pytest.mark.parametrize("case", ["audio", "audio_speech", "image_and_audio"])
def test_mel_is_the_goldens(
    case: str,
    goldens: dict[str, Any],
    golden_arrays: Callable[[str], Mapping[str, np.ndarray]],
    media_dir: Path,
) -> None:
    parts = goldens[case]["request"]["messages"][0]["content"]
    (name,) = [part["audio"] for part in parts if part["type"] == "audio"]
    samples = decode_audio("audio[0]", (media_dir / name).read_bytes(), 60)
    mel, lengths = log_mel_chunks("audio[0]", samples)
    assert lengths.tolist() == goldens[case]["expected"]["mel_lens"]
    np.testing.assert_allclose(mel.T, golden_arrays(case)["mel_0"], rtol=0, atol=1e-5)
    ((start, end),) = goldens[case]["expected"]["audio_bounds"]
    assert num_audio_tokens(int(lengths[0])) == end - start


@pytest.mark.parametrize("num_samples", [480_000, 479_999, 479_801, 479_640, 479_520, 100_001, 1_281])
def test_mel_is_the_padded_extractors(num_samples: int) -> None:
    """The loudest moment is the very end, where only frames that are cut off see most of it."""
    transformers = pytest.importorskip("transformers")
    samples = np.random.default_rng(1).standard_normal(num_samples).astype(np.float32) * 0.01
    samples[-150:] = 0.9 * (-1.0) ** np.arange(150)
    features = transformers.WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="np")
    expected = features["input_features"][0].T[: -(-num_samples // 160)]
    np.testing.assert_allclose(log_mel(samples), expected, rtol=0, atol=1e-5)


def test_silence_is_the_floor() -> None:
    assert np.all(log_mel(np.zeros(16_000, np.float32)) == np.float32(-1.5))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_resampling_in_blocks_is_resampling_at_once(rate: int) -> None:
    samples = np.random.default_rng(0).standard_normal(rate * 30 + 17).astype(np.float32) * 0.1
    result = decode_audio("audio[0]", encoded(samples, rate), 60)
    expected = soxr.resample(samples, rate, 16_000, quality="HQ")
    assert len(result) == -(-len(samples) * 16_000 // rate)
    shared = min(len(result), len(expected))
    assert abs(len(result) - len(expected)) <= 1
    np.testing.assert_allclose(result[:shared], expected[:shared], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("audio_format", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.1),
    ],
)
def test_formats_and_mono_mix(audio_format: str, subtype: str, tolerance: float) -> None:
    stereo = np.stack([TONE, -0.5 * TONE], axis=1)
    samples = decode_audio("audio[0]", encoded(stereo, format=audio_format, subtype=subtype), 60)
    assert samples.dtype == np.float32
    assert len(samples) == len(TONE)
    assert np.abs(samples - 0.25 * TONE)[2_000:-2_000].max() < tolerance


@pytest.mark.parametrize(
    ("audio_format", "subtype"),
    [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")],
)
def test_a_truncated_file_is_refused(audio_format: str, subtype: str) -> None:
    noise = np.random.default_rng(0).standard_normal(48_000).astype(np.float32) * 0.1
    data = encoded(noise, format=audio_format, subtype=subtype)
    with pytest.raises(InvalidArgument, match=r"audio\[2\]: is truncated"):
        decode_audio("audio[2]", data[: len(data) * 2 // 3], 60)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_written_to_a_pipe_is_whole(size: int) -> None:
    data = bytearray(encoded(TONE, subtype="PCM_16"))
    position = data.index(b"data") + 4
    data[position : position + 4] = size.to_bytes(4, "little")
    if size == 0:
        with pytest.raises(InvalidArgument, match="holds no samples"):
            decode_audio("audio[0]", bytes(data), 60)
    else:
        assert len(decode_audio("audio[0]", bytes(data), 60)) == len(TONE)


def test_limits_and_bad_samples_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="longer than 2 s"):
        decode_audio("audio[0]", encoded(TONE), 2)
    assert len(decode_audio("audio[0]", encoded(TONE), 3)) == 48_000
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = TONE.copy()
        spoilt[4_000] = bad
        with pytest.raises(InvalidArgument, match="not finite"):
            decode_audio("audio[0]", encoded(spoilt), 60)
    with pytest.raises(InvalidArgument, match="no samples"):
        decode_audio("audio[0]", encoded(TONE[:0]), 60)
    with pytest.raises(InvalidArgument, match="AIFF audio"):
        decode_audio("audio[0]", encoded(TONE, format="AIFF"), 60)
    with pytest.raises(InvalidArgument, match="sample rate of 500 Hz"):
        decode_audio("audio[0]", encoded(TONE, 500), 600)
    with pytest.raises(InvalidArgument, match="malformed or not audio"):
        decode_audio("audio[0]", b"\xff\xd8\xff\xe0 a picture", 60)


def test_a_flac_of_unknown_length_is_read_to_its_end_and_no_further() -> None:
    data = bytearray(encoded(TONE, format="FLAC", subtype="PCM_16"))
    # STREAMINFO: the low 36 bits of these 8 bytes are the number of samples; 0 is unknown.
    packed = int.from_bytes(data[18:26], "big")
    assert packed & (2**36 - 1) == len(TONE)
    data[18:26] = (packed >> 36 << 36).to_bytes(8, "big")
    assert len(decode_audio("audio[0]", bytes(data), 60)) == len(TONE)
    with pytest.raises(InvalidArgument, match="longer than 2 s"):
        decode_audio("audio[0]", bytes(data), 2)


def test_chunks_of_thirty_seconds_and_tails_too_short_for_a_token() -> None:
    second = np.random.default_rng(0).standard_normal(16_000 * 61).astype(np.float32) * 0.1
    mel, lengths = log_mel_chunks("audio[0]", second)
    assert lengths.tolist() == [3000, 3000, 100]
    assert len(mel) == 6100
    np.testing.assert_array_equal(mel[3000:6000], log_mel(second[480_000:960_000]))
    for extra, expected in ((1_280, [3000]), (1_281, [3000, 9])):
        assert log_mel_chunks("audio[0]", second[: 480_000 + extra])[1].tolist() == expected
    assert log_mel_chunks("audio[0]", second[:1_281])[1].tolist() == [9]
    for samples in (second[:1_280], second[:0]):
        with pytest.raises(InvalidArgument, match="too short for one token"):
            log_mel_chunks("audio[0]", samples)


def test_token_counts_are_those_of_a_stride_and_a_pool() -> None:
    for frames in range(1, 3001):
        positions = len(range(0, frames, 2))
        assert num_audio_tokens(frames) == len(range(0, positions - 4, 5))


def test_the_tokens_of_chunks_are_those_of_the_whole_recording() -> None:
    """The published count is of the whole recording's frames; that of its chunks is never another."""
    for frames in range(9, 9_100):
        chunks = [min(3000, frames - start) for start in range(0, frames, 3000)]
        counts = [num_audio_tokens(chunk) for chunk in chunks]
        assert sum(max(count, 0) for count in counts) == num_audio_tokens(frames)
        assert counts[-1] >= 0


def test_sound_of_a_power_beyond_float32_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"^audio\[0\]: is so loud"):
        log_mel_chunks("audio[0]", np.full(16_000, 1e25, np.float32))
