"""Whole requests: goldens, many at once, and one bad request beside good ones."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicpmo_triton import preprocess, schema
from minicpmo_triton.config import PreprocessParameters
from minicpmo_triton.errors import CheckpointError, InvalidArgument, MiniCPMOError
from minicpmo_triton.preprocess import Preprocessed, Preprocessor
from minicpmo_triton.request import RawRequest

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


def test_a_long_recording_drops_a_tail_without_a_token(preprocessor: Preprocessor) -> None:
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(480_000 * 2 + 1_000, np.float32), 16_000, format="FLAC")
    result = preprocessor.process(RawRequest(text_input=b"x", audios=(file.getvalue(),)))
    assert_consistent(result)
    assert result.mel_lengths.tolist() == [3000, 3000]
    assert len(result.audio_positions) == 600
    assert (np.diff(result.audio_positions) == 1).all()  # one run of placeholders


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

    monkeypatch.setattr(preprocess, "slice_image", fails)
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
        ({"max_media_items": 1}, lambda i, a: RawRequest(text_input=b"x", images=(i, i)), "image"),
        ({"max_media_items": 1}, lambda i, a: RawRequest(text_input=b"x", audios=(a, a)), "audio"),
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
