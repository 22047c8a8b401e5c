"""Whole requests: goldens, many at once, and one bad request beside good ones."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from minicpmo_triton import preprocess, schema
from minicpmo_triton.checkpoint import Checkpoint
from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.encoders.batching import AudioEncoder, AudioItem
from minicpmo_triton.errors import CheckpointError, InvalidArgument, MiniCPMOError
from minicpmo_triton.preprocess import Preprocessed, Preprocessor
from minicpmo_triton.prompt import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER
from minicpmo_triton.request import RawRequest
from tests.unit.video_files import seconds_video, tone, video_file

LIMITS = {"checkpoint": "unused", "num_threads": 2}
DTYPES = {"INT32": np.int32, "UINT8": np.uint8, "FP32": np.float32}


@pytest.fixture(scope="module")
def preprocessor(tiny_checkpoint: Path) -> Iterator[Preprocessor]:
    made = Preprocessor(tiny_checkpoint, PreprocessParameters(**LIMITS))
    yield made
    made.close()


def golden_request(request: dict[str, Any], media_dir: Path) -> RawRequest:
    """The fixture's request as a client sends it: files in the inputs, in order."""
    files: dict[str, list[bytes]] = {"image": [], "audio": []}
    messages = []
    for message in request["messages"]:
        content = message["content"]
        if isinstance(content, list):
            for part in content:
                if part["type"] in files:
                    files[part["type"]].append((media_dir / part[part["type"]]).read_bytes())
            content = [p if p["type"] == "text" else {"type": p["type"]} for p in content]
        messages.append({"role": message["role"], "content": content})
    names = {"omni": "omni_mode"} | {n: n for n in ("max_slice_nums", "use_image_id", "enable_thinking")}
    parameters = {name: request[key] for key, name in names.items() if key in request}
    return RawRequest(
        messages=json.dumps(messages).encode(),
        images=tuple(files["image"]),
        audios=tuple(files["audio"]),
        media_parameters=json.dumps(parameters).encode(),
    )


def assert_consistent(result: Preprocessed) -> None:
    """Counts agree as the encoders and the language model expect them."""
    for tensor in schema.PREPROCESS.outputs:
        array = getattr(result, tensor.name)
        assert array.dtype == DTYPES[tensor.dtype], tensor.name
        assert array.ndim == len(tensor.dims), tensor.name
        assert array.flags.c_contiguous, tensor.name
    assert len(result.patches) == result.grid_sizes.prod(axis=1).sum()
    assert len(result.image_positions) == 64 * len(result.grid_sizes)
    assert len(result.mel) == result.mel_lengths.sum()
    rows = (((result.mel_lengths - 1) // 2 + 1) - 5) // 5 + 1
    assert len(result.audio_positions) == rows.sum()


def assert_equal(left: Preprocessed, right: Preprocessed) -> None:
    assert left.prompt == right.prompt
    for field in dataclasses.fields(Preprocessed)[1:]:
        np.testing.assert_array_equal(getattr(left, field.name), getattr(right, field.name))


def test_goldens_all_at_once(
    preprocessor: Preprocessor,
    goldens: dict[str, Any],
    golden_arrays: Callable[[str], Mapping[str, np.ndarray]],
    media_dir: Path,
) -> None:
    results = preprocessor.process_all([golden_request(c["request"], media_dir) for c in goldens.values()])
    for (name, case), result in zip(goldens.items(), results, strict=True):
        expected = case["expected"]
        assert isinstance(result, Preprocessed), result
        assert_consistent(result)
        assert result.prompt == expected["prompt"]
        assert result.input_ids.tolist() == expected["input_ids"]
        bounds = expected["image_bounds"]
        assert result.image_positions.tolist() == [i for start, end in bounds for i in range(start, end)]
        bounds = expected["audio_bounds"]
        assert result.audio_positions.tolist() == [i for start, end in bounds for i in range(start, end)]
        assert result.grid_sizes.tolist() == expected["tgt_sizes"]
        assert result.mel_lengths.tolist() == expected.get("mel_lens", [])
        arrays = golden_arrays(name)
        if "mel_0" in arrays:
            np.testing.assert_allclose(result.mel.T, arrays["mel_0"], rtol=0, atol=1e-5)
        if "pixel_0_val" in arrays:
            first = result.patches[: result.grid_sizes[0].prod()].reshape(-1, 3, 14, 14)
            pixels = first.transpose(1, 2, 0, 3).ravel()[arrays["pixel_0_idx"]].astype(np.float32)
            normalised = (pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
            np.testing.assert_array_equal(normalised, arrays["pixel_0_val"])


def test_the_same_media_as_data_uris(preprocessor: Preprocessor, media_dir: Path) -> None:
    image = (media_dir / "small_200x300.png").read_bytes()
    audio = (media_dir / "front_center_16k.wav").read_bytes()
    content = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()},
        },
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(audio).decode(), "format": "wav"}},
        {"type": "text", "text": "Answer."},
    ]
    carried = RawRequest(messages=json.dumps([{"role": "user", "content": content}]).encode())
    given = RawRequest(text_input=b"Answer.", images=(image,), audios=(audio,))
    assert_equal(preprocessor.process(carried), preprocessor.process(given))


@pytest.fixture(scope="module")
def audio_encoder(tiny_checkpoint: Path) -> AudioEncoder:
    return AudioEncoder.from_checkpoint(Checkpoint(tiny_checkpoint), torch.float32, "cpu")


@pytest.mark.parametrize("seconds", [0.1, 0.3, 29.99, 30.00, 30.01, 61, 300])
def test_placeholders_are_as_many_as_the_encoders_rows(
    seconds: float, preprocessor: Preprocessor, audio_encoder: AudioEncoder
) -> None:
    samples = (0.1 * np.sin(np.arange(round(seconds * 16_000)) * 0.05)).astype(np.float32)
    result = preprocessor.process(RawRequest(text_input=b"x", audios=(flac(samples),)))
    assert_consistent(result)
    positions = result.audio_positions
    assert (np.diff(positions) == 1).all()  # one run, whatever the number of chunks
    (rows,) = audio_encoder.encode([AudioItem(result.mel, result.mel_lengths)])
    assert not isinstance(rows, InvalidArgument)
    assert len(rows) == len(positions)
    # As published, over the frames of the whole recording.
    num_frames = -(-len(samples) // 160)
    assert len(positions) == (((num_frames - 1) // 2 + 1) - 5) // 5 + 1


def test_a_recording_without_a_token_is_refused(preprocessor: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match="too short for one token") as caught:
        preprocessor.process(RawRequest(text_input=b"x", audios=(flac(np.zeros(1_280, np.float32)),)))
    assert caught.value.field == "audio[0]"


def flac(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="FLAC")
    return file.getvalue()


def test_a_long_recording_drops_a_tail_without_a_token(preprocessor: Preprocessor) -> None:
    silence = flac(np.zeros(480_000 * 2 + 1_000, np.float32))
    result = preprocessor.process(RawRequest(text_input=b"x", audios=(silence,)))
    assert_consistent(result)
    assert result.mel_lengths.tolist() == [3000, 3000]
    assert len(result.audio_positions) == 600
    assert (np.diff(result.audio_positions) == 1).all()  # one run of placeholders


def test_a_videos_frames_are_the_images_of_the_frames_golden(
    preprocessor: Preprocessor, goldens: dict[str, Any]
) -> None:
    """Laid out as that golden's prompt, whose pictures are frames in omni mode, with another question."""
    data = seconds_video(3, size=(640, 360))
    result = preprocessor.process(
        RawRequest(
            text_input=b"What happens?",
            videos=(data,),
            media_parameters=json.dumps({"omni_mode": True}).encode(),
        )
    )
    assert_consistent(result)
    expected = goldens["frames"]["expected"]
    assert result.prompt == expected["prompt"]
    assert result.input_ids.tolist() == expected["input_ids"]  # frames have no number, though on by default
    bounds = expected["image_bounds"]
    assert result.image_positions.tolist() == [i for start, end in bounds for i in range(start, end)]
    assert len(np.unique(result.grid_sizes, axis=0)) == 1  # one shape, so one batch
    assert len(result.mel) == 0


def test_omni_mode_puts_each_seconds_sound_behind_its_frames(preprocessor: Preprocessor) -> None:
    data = seconds_video(4, True)

    def prompt_of(**parameters: Any) -> tuple[str, Preprocessed]:
        raw = RawRequest(text_input=b"Hi", videos=(data,), media_parameters=json.dumps(parameters).encode())
        result = preprocessor.process(raw)
        assert_consistent(result)
        content = result.prompt.split("user\n")[1].split("<|im_end|>")[0]
        return content.replace(IMAGE_PLACEHOLDER, "I").replace(AUDIO_PLACEHOLDER, "A"), result

    content, result = prompt_of(omni_mode=True)
    assert content == "IAIAIAIAHi"
    assert "<|tts_bos|>" in result.prompt
    assert result.mel_lengths.tolist() == [100] * 4
    assert prompt_of(omni_mode=True, video_fps=2)[0] == "IIAIIAIIAIIAHi"
    assert prompt_of(omni_mode=True, max_frames=2)[0] == "IAAIAAHi"
    assert prompt_of(omni_mode=True, video_fps=0.25)[0] == "IAAAAHi"
    content, result = prompt_of()
    assert content == "I\nI\nI\nI\nHi"
    assert "<|tts_bos|>" not in result.prompt
    assert len(result.mel) == 0
    # Each second is heard as a clip of its own.
    loud = prompt_of(omni_mode=True)[1].mel.reshape(4, 100, 80)[:, 20:80].mean(axis=1).argmax(axis=1)
    assert (np.diff(loud) > 0).all()  # tones rise


def test_videos_without_sound_and_last_seconds_too_short_for_a_token(preprocessor: Preprocessor) -> None:
    omni = json.dumps({"omni_mode": True}).encode()
    silent = preprocessor.process(
        RawRequest(text_input=b"Hi", videos=(seconds_video(2),), media_parameters=omni)
    )
    assert silent.prompt.count(IMAGE_PLACEHOLDER) == 2
    assert AUDIO_PLACEHOLDER not in silent.prompt
    assert "<|tts_bos|>" not in silent.prompt
    frames = [(Fraction(i, 10), np.zeros((48, 64, 3), np.uint8)) for i in range(20)]
    sound = np.concatenate([tone(0), tone(1, 3_840)])  # 0.08 s
    data = video_file(frames, sound, container="matroska", sound_codec="pcm_s16le")
    result = preprocessor.process(RawRequest(text_input=b"Hi", videos=(data,), media_parameters=omni))
    assert_consistent(result)
    assert result.mel_lengths.tolist() == [100]


def test_images_recordings_and_videos_stay_in_order(preprocessor: Preprocessor, media_dir: Path) -> None:
    image = (media_dir / "small_200x300.png").read_bytes()
    audio = (media_dir / "front_center_16k.wav").read_bytes()
    video = seconds_video(2, True)
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "image"}, {"type": "audio"}]},
        {"role": "assistant", "content": "Yes."},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    result = preprocessor.process(
        RawRequest(
            messages=json.dumps(messages).encode(),
            images=(image, image),
            audios=(audio,),
            videos=(video,),
            media_parameters=b'{"omni_mode": true}',
        )
    )
    assert_consistent(result)
    frame, still = [28, 37], [39, 26]
    assert result.grid_sizes.tolist() == [frame, frame, still, still, frame, frame]
    assert result.mel_lengths.tolist() == [100, 100, 143, 100, 100]
    text = preprocessor._prompts._tokenizer
    ids = result.input_ids.tolist()
    number_ids = [text.encode([str(number)])[0].tolist() for number in range(2)]
    starts = [i for i, token in enumerate(ids) if token == text.control_id("<image_id>")]
    # Images are numbered, without counting frames.
    assert [ids[i + 1 : i + 1 + len(n)] for i, n in zip(starts, number_ids, strict=True)] == number_ids


def test_low_detail_is_one_slice_of_that_image_only(preprocessor: Preprocessor, media_dir: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode((media_dir / "astronaut.png").read_bytes()).decode()

    def num_slices(*details: str) -> int:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": d}} for d in details]
        messages = json.dumps([{"role": "user", "content": parts}]).encode()
        return len(preprocessor.process(RawRequest(messages=messages)).grid_sizes)

    full = num_slices("high")
    assert full > 1
    assert num_slices("auto") == full
    assert num_slices("low") == 1
    assert num_slices("low", "high") == 1 + full


def test_frames_of_all_videos_are_limited_before_any_is_decoded(preprocessor: Preprocessor) -> None:
    raw = RawRequest(text_input=b"x", videos=(b"\x00",) * 9)
    with pytest.raises(InvalidArgument, match="9 videos of up to 64 frames") as caught:
        preprocessor.process(raw)
    assert caught.value.field == "media_parameters.max_frames"


def test_bad_requests_cost_only_themselves(preprocessor: Preprocessor, media_dir: Path) -> None:
    image = (media_dir / "small_200x300.png").read_bytes()
    audio = (media_dir / "front_center_16k.wav").read_bytes()
    good = RawRequest(text_input=b"Hi", images=(image,), audios=(audio,))
    alone = preprocessor.process(good)
    bad = {
        "image[1]": RawRequest(text_input=b"Hi", images=(image, image[:5_000], image)),
        "image[0]": RawRequest(text_input=b"Hi", images=(audio,)),
        "audio[0]": RawRequest(text_input=b"Hi", audios=(image,)),
        "audio[1]": RawRequest(text_input=b"Hi", audios=(audio, audio[:3_000])),
        "video[0]": RawRequest(text_input=b"Hi", videos=(image,)),
        "video[1]": RawRequest(text_input=b"Hi", videos=(seconds_video(1), seconds_video(1)[:-9])),
        "text_input": RawRequest(text_input=b""),
        "media_parameters.fps": RawRequest(text_input=b"Hi", media_parameters=b'{"fps": 1}'),
    }
    results = preprocessor.process_all([good, *(r for raw in bad.values() for r in (raw, good))])
    for result in results[::2]:
        assert isinstance(result, Preprocessed)
        assert_equal(result, alone)
    for field, error in zip(bad, results[1::2], strict=True):
        assert isinstance(error, InvalidArgument)
        assert error.field == field
    with pytest.raises(InvalidArgument, match="text_input"):
        preprocessor.process(bad["text_input"])


def test_the_unforeseen_is_logged_and_not_told(
    preprocessor: Preprocessor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    media_dir: Path,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr(preprocess, "decode_and_slice", fails)
    image = (media_dir / "small_200x300.png").read_bytes()
    results = preprocessor.process_all(
        [RawRequest(text_input=b"Hi", images=(image,)), RawRequest(text_input=b"Hi")]
    )
    assert isinstance(results[1], Preprocessed)
    assert type(results[0]) is MiniCPMOError
    assert results[0].code == "INTERNAL"
    assert "secret" not in str(results[0])
    assert "secret of the house" in caplog.text


@pytest.mark.parametrize(
    ("limit", "raw_of", "field"),
    [
        ({"max_text_characters": 4}, lambda i, a: RawRequest(text_input=b"Hello"), "text_input"),
        (
            {"max_text_characters": 4},
            lambda i, a: RawRequest(
                messages=b'[{"role": "system", "content": "Hi!"}, {"role": "user", "content": "So"}]'
            ),
            "messages",
        ),
        ({"max_media_items": 1}, lambda i, a: RawRequest(text_input=b"x", images=(i, i)), "image"),
        ({"max_media_items": 1}, lambda i, a: RawRequest(text_input=b"x", audios=(a, a)), "audio"),
        ({"max_media_items": 1}, lambda i, a: RawRequest(text_input=b"x", videos=(i, i)), "video"),
        (
            {"max_video_seconds": 1},
            lambda i, a: RawRequest(text_input=b"x", videos=(seconds_video(2),)),
            "video[0]",
        ),
        (
            {"max_video_pixels": 3_071},
            lambda i, a: RawRequest(text_input=b"x", videos=(seconds_video(1),)),
            "video[0]",
        ),
        ({"max_media_bytes": 1_000}, lambda i, a: RawRequest(text_input=b"x", images=(i,)), "image[0]"),
        ({"max_image_pixels": 59_999}, lambda i, a: RawRequest(text_input=b"x", images=(i,)), "image[0]"),
        ({"max_audio_seconds": 1}, lambda i, a: RawRequest(text_input=b"x", audios=(a,)), "audio[0]"),
    ],
)
def test_limits(
    tiny_checkpoint: Path,
    media_dir: Path,
    limit: dict[str, int],
    raw_of: Callable[[bytes, bytes], RawRequest],
    field: str,
) -> None:
    raw = raw_of(
        (media_dir / "small_200x300.png").read_bytes(), (media_dir / "front_center_16k.wav").read_bytes()
    )
    strict = Preprocessor(tiny_checkpoint, PreprocessParameters(**LIMITS | limit))
    try:
        with pytest.raises(InvalidArgument, match=r"at most|longer than") as caught:
            strict.process(raw)
        assert caught.value.field == field
        assert isinstance(strict.process(RawRequest(text_input=b"x")), Preprocessed)
    finally:
        strict.close()


def test_limits_count_media_that_messages_carry(tiny_checkpoint: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = json.dumps([{"role": "user", "content": [part] * 3}]).encode()
    strict = Preprocessor(tiny_checkpoint, PreprocessParameters(**LIMITS | {"max_media_items": 2}))
    with pytest.raises(InvalidArgument, match="at most 2"):
        strict.process(RawRequest(messages=messages))
    strict.close()


def test_several_callers_share_the_pool(preprocessor: Preprocessor, media_dir: Path) -> None:
    image = (media_dir / "small_200x300.png").read_bytes()
    raws = [RawRequest(text_input=f"Number {i}".encode(), images=(image,) * (i % 3)) for i in range(8)]
    expected = [preprocessor.process(raw) for raw in raws]
    before = threading.active_count()
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(preprocessor.process_all, [raws] * 4))
    for results in answers:
        for result, other in zip(results, expected, strict=True):
            assert isinstance(result, Preprocessed)
            assert_equal(result, other)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "change", [{"patch_size": 16}, {"max_slice_nums": "9"}, {"audio_pool_step": 2}, {"use_image_id": 1}]
)
def test_an_unsupported_processor_config_fails_the_load(
    tiny_checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    config = json.loads((tiny_checkpoint / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=next(iter(change))):
        Preprocessor(tmp_path, PreprocessParameters(**LIMITS))
