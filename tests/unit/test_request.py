"""Requests are parsed strictly, and a refusal names the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.request import (
    MAX_FRAMES,
    MAX_SLICE_NUMS,
    AudioPart,
    FramePart,
    ImagePart,
    MediaParameters,
    Message,
    RawRequest,
    SoundPart,
    TextPart,
    VideoPart,
    parse_request,
)

USER = {"role": "user", "content": "Hi"}


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def content(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def test_text_input_is_one_turn_of_images_then_audios_then_videos_then_text() -> None:
    request = parse_request(
        RawRequest(text_input="héllo".encode(), images=(b"i0", b"i1"), audios=(b"a0",), videos=(b"v0", b"v1"))
    )
    assert request.messages == (
        Message(
            "user",
            (
                ImagePart("image[0]", b"i0"),
                ImagePart("image[1]", b"i1"),
                AudioPart("audio[0]", b"a0"),
                VideoPart("video[0]", b"v0"),
                VideoPart("video[1]", b"v1"),
                TextPart("héllo"),
            ),
        ),
    )
    assert request.parameters == MediaParameters(None, None, False, False, 1, 64)


def test_media_alone_need_no_text() -> None:
    assert parse_request(RawRequest(text_input=b"", videos=(b"v",))).videos == [VideoPart("video[0]", b"v")]
    assert parse_request(RawRequest(text_input=b"", images=(b"i",))).messages[0].parts == (
        ImagePart("image[0]", b"i"),
    )


def test_messages_take_elements_in_order_and_carry_their_own() -> None:
    messages = [
        {"role": "system", "content": [{"type": "audio"}, {"type": "text", "text": "Use this voice."}]},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}},
                {"type": "image"},
                {"type": "audio"},
            ],
        },
        {"role": "assistant", "content": "A cat."},
        USER,
    ]
    request = parse_request(
        RawRequest(messages=dumped(messages), images=(b"i0", b"i1"), audios=(b"a0", b"a1"))
    )
    assert [m.role for m in request.messages] == ["system", "user", "assistant", "user"]
    assert request.images == [
        ImagePart("image[0]", b"i0"),
        ImagePart("messages[1].content[1].image_url.url", b"data:image/png;base64,AAAA"),
        ImagePart("image[1]", b"i1"),
    ]
    assert request.audios == [
        AudioPart("audio[0]", b"a0"),
        AudioPart("messages[1].content[2].input_audio.data", b"BBBB"),
        AudioPart("audio[1]", b"a1"),
    ]


def test_videos_of_messages_and_what_they_are_replaced_by() -> None:
    url = {"url": "data:video/mp4;base64,AAAA"}
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "video_url", "video_url": url}]},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "And?"}]},
    ]
    request = parse_request(RawRequest(messages=dumped(messages), images=(b"i",), videos=(b"v0", b"v1")))
    assert request.videos == [
        VideoPart("video[0]", b"v0"),
        VideoPart("messages[0].content[1].video_url.url", b"data:video/mp4;base64,AAAA"),
        VideoPart("video[1]", b"v1"),
    ]
    replaced = request.with_videos([[FramePart(), SoundPart()], [], [FramePart()] * 2])
    assert [message.parts for message in replaced.messages] == [
        (FramePart(), SoundPart()),
        (TextPart("A dog."),),
        (ImagePart("image[0]", b"i"), FramePart(), FramePart(), TextPart("And?")),
    ]
    assert replaced.parameters == request.parameters


@pytest.mark.parametrize(("detail", "max_slice_nums"), [("low", 1), ("high", None), ("auto", None)])
def test_low_detail_is_the_whole_picture_alone(detail: str, max_slice_nums: int | None) -> None:
    url = {"url": "data:image/png;base64,AAAA", "detail": detail}
    messages = dumped(content({"type": "image_url", "image_url": url}))
    (image,) = parse_request(RawRequest(messages=messages)).images
    assert image.max_slice_nums == max_slice_nums


@pytest.mark.parametrize("fps", [1, 0.5, 1000, 1e-300])
def test_video_parameters(fps: float) -> None:
    parameters = parse_request(
        RawRequest(text_input=b"x", media_parameters=dumped({"video_fps": fps, "max_frames": MAX_FRAMES}))
    ).parameters
    assert (parameters.video_fps, parameters.max_frames) == (fps, MAX_FRAMES)


def test_media_parameters() -> None:
    values = {"max_slice_nums": 4, "use_image_id": False, "omni_mode": True, "enable_thinking": True}
    request = parse_request(RawRequest(text_input=b"x", media_parameters=dumped(values)))
    assert request.parameters == MediaParameters(4, False, True, True)


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        ({"max_slices": 4}, "media_parameters.max_slices", "known are max_slice_nums"),
        ({"max_slice_nums": True}, "media_parameters.max_slice_nums", "expected an integer, got a boolean"),
        ({"max_slice_nums": 4.0}, "media_parameters.max_slice_nums", "expected an integer, got a number"),
        ({"max_slice_nums": "4"}, "media_parameters.max_slice_nums", "got a string"),
        ({"max_slice_nums": None}, "media_parameters.max_slice_nums", "got null"),
        ({"max_slice_nums": 0}, "media_parameters.max_slice_nums", "expected 1 to"),
        ({"max_slice_nums": MAX_SLICE_NUMS + 1}, "media_parameters.max_slice_nums", "expected 1 to"),
        ({"omni_mode": 1}, "media_parameters.omni_mode", "expected true or false, got a number"),
        ({"use_image_id": None}, "media_parameters.use_image_id", "got null"),
        ({"enable_thinking": "true"}, "media_parameters.enable_thinking", "got a string"),
        ({"video_fps": 0}, "media_parameters.video_fps", "more than 0 and at most 1000, got 0"),
        ({"video_fps": -1}, "media_parameters.video_fps", "more than 0"),
        ({"video_fps": 1000.5}, "media_parameters.video_fps", "at most 1000"),
        ({"video_fps": 10**400}, "media_parameters.video_fps", "at most 1000"),
        ({"video_fps": float("nan")}, "media_parameters.video_fps", "more than 0"),
        ({"video_fps": float("inf")}, "media_parameters.video_fps", "at most 1000"),
        ({"video_fps": True}, "media_parameters.video_fps", "expected a number, got a boolean"),
        ({"video_fps": "1"}, "media_parameters.video_fps", "expected a number, got a string"),
        ({"max_frames": 0}, "media_parameters.max_frames", "expected 1 to 512"),
        ({"max_frames": MAX_FRAMES + 1}, "media_parameters.max_frames", "expected 1 to 512"),
        ({"max_frames": 8.0}, "media_parameters.max_frames", "expected an integer"),
        ([], "media_parameters", "expected an object, got a list"),
    ],
)
def test_wrong_media_parameters(value: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_request(RawRequest(text_input=b"x", media_parameters=dumped(value)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "field", "problem"),
    [
        ({}, "messages", "expected a list, got an object"),
        ([], "messages", "is empty"),
        (["Hi"], "messages[0]", "expected an object, got a string"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"content": "Hi"}], "messages[0].role", "is missing"),
        ([USER | {"name": "Bo"}], "messages[0].name", "is unknown; known are role, content"),
        ([USER | {"role": "tool"}], "messages[0].role", "expected one of system, user, assistant"),
        ([USER | {"role": 1}], "messages[0].role", "expected a string"),
        ([USER | {"content": 5}], "messages[0].content", "a string or a list of parts, got a number"),
        ([USER | {"content": []}], "messages[0].content", "is empty"),
        ([USER | {"content": " \n"}], "messages[0].content", "is empty"),
        ([USER, {"role": "assistant", "content": "A"}], "messages[1].role", "must be a user's"),
        (content({"type": "text", "text": 5}), "messages[0].content[0].text", "expected a string"),
        (content({"type": "text"}), "messages[0].content[0].text", "is missing"),
        (content({"type": "text", "text": ""}), "messages[0].content", "is empty"),
        (content({"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x", "is unknown"),
        (content("Hi"), "messages[0].content[0]", "expected an object"),
        (content({}), "messages[0].content[0].type", "is missing"),
        (content({"type": "clip"}), "messages[0].content[0].type", "got 'clip'"),
        (content({"type": ["text"]}), "messages[0].content[0].type", "expected text, image"),
        (content({"type": "image"}), "messages[0].content[0]", "the image input has 0 elements"),
        (content({"type": "audio"}), "messages[0].content[0]", r"takes audio\[0\]"),
        (content({"type": "video"}), "messages[0].content[0]", "the video input has 0 elements"),
        (content({"type": "image", "image": "x"}), "messages[0].content[0].image", "is unknown"),
        (
            content({"type": "video_url", "video_url": {"url": "HTTP://host/a.mp4"}}),
            "messages[0].content[0].video_url.url",
            "the server fetches nothing",
        ),
        (
            content({"type": "video_url", "video_url": {"url": "data:,", "detail": "low"}}),
            "messages[0].content[0].video_url.detail",
            "is unknown",
        ),
        (
            content({"type": "video_url", "video_url": "data:,"}),
            "messages[0].content[0].video_url",
            "expected an object",
        ),
        (
            content({"type": "image_url", "image_url": {"url": "data:,", "detail": "medium"}}),
            "messages[0].content[0].image_url.detail",
            "expected one of auto, low, high",
        ),
        (
            content({"type": "image_url", "image_url": {"url": "data:,", "detail": 1}}),
            "messages[0].content[0].image_url.detail",
            "expected a string",
        ),
        (
            content({"type": "image_url", "image_url": {"url": "https://host/a.png"}}),
            "messages[0].content[0].image_url.url",
            "the server fetches nothing",
        ),
        (
            content({"type": "image_url", "image_url": "data:,"}),
            "messages[0].content[0].image_url",
            "expected an object",
        ),
        (
            content({"type": "input_audio", "input_audio": {"data": "AA==", "format": "aac"}}),
            "messages[0].content[0].input_audio.format",
            "expected one of wav",
        ),
        (
            [
                USER,
                {"role": "assistant", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]},
                USER,
            ],
            "messages[1].content[0].type",
            "holds only text",
        ),
        ([USER | {"content": "\ud800"}], "messages[0].content", "lone surrogate"),
    ],
)
def test_wrong_messages(messages: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_request(RawRequest(messages=dumped(messages)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("raw", "field", "problem"),
    [
        (RawRequest(), "text_input", "neither is there"),
        (RawRequest(text_input=b"x", messages=dumped([USER])), "text_input", "not both"),
        (RawRequest(text_input=b""), "text_input", "is empty"),
        (RawRequest(text_input=b" \n\t"), "text_input", "is empty"),
        (RawRequest(text_input=b"ab\xff"), "text_input", "not valid UTF-8 at byte 2"),
        (RawRequest(messages=b"[\xff]"), "messages", "not valid UTF-8"),
        (RawRequest(messages=b"[{"), "messages", "not valid JSON"),
        (RawRequest(messages=b""), "messages", "not valid JSON"),
        (RawRequest(messages=b"[" * 100_000), "messages", "nesting"),
        (RawRequest(messages=b"[" + b"1" * 5_000 + b"]"), "messages", "a number"),
        (RawRequest(text_input=b"x", media_parameters=b"max_slice_nums=4"), "media_parameters", "JSON"),
        (RawRequest(messages=dumped([USER]), images=(b"a",)), "image[0]", "no image part"),
        (
            RawRequest(messages=dumped(content({"type": "audio"})), audios=(b"a", b"b")),
            "audio[1]",
            "no audio part",
        ),
        (RawRequest(messages=dumped([USER]), videos=(b"a",)), "video[0]", "no video part"),
    ],
)
def test_wrong_inputs(raw: RawRequest, field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_request(raw)
    assert caught.value.field == field
