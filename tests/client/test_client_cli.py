"""The command ``minicpmo``: what it sends, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicpmo_client import Chunk, Client, FakeTransport, InvalidRequest, Response
from minicpmo_client.cli import main
from minicpmo_client.commands import Timings, size_text
from minicpmo_client.progress import Spinner


def maker(fake: FakeTransport, made: list[Any] | None = None) -> Callable[..., Client]:
    def make(url: str, *, model: str) -> Client:
        if made is not None:
            made.append((url, model))
        return Client(url, model=model, transport=fake)

    return make


def run(*argv: str, fake: FakeTransport) -> int:
    return main(argv, make_client=maker(fake))


def test_a_plain_question(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeTransport(["A ", "cat."])
    made: list[Any] = []
    assert main(["chat", "What?"], make_client=maker(fake, made)) == 0
    assert capsys.readouterr() == ("A cat.\n", "")
    assert made == [("localhost:8001", "minicpmo")]
    (request,) = fake.requests
    assert json.loads(request.inputs["messages"][0]) == [{"role": "user", "content": "What?"}]
    assert set(request.inputs) == {"messages", "stream"}
    assert fake.timeouts_s == [600.0]
    assert fake.closed


def test_every_option_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, audio = tmp_path / "i.png", tmp_path / "a.wav"
    image.write_bytes(b"image")
    audio.write_bytes(b"audio")
    fake = FakeTransport(["ok"])
    made: list[Any] = []
    media = ["--image", str(image), "--image", str(image), "--audio", str(audio), "--video", str(image)]
    server = ["--url", "h:1", "--model", "m", "--timeout-s", "9"]
    sampling = ["--max-tokens", "7", "--temperature", "0", "--seed", "5"]
    others = ["--system", "S", "--max-slice-nums", "4", "--thinking", "--no-stream", "--timings"]
    argv = ["chat", *server, *media, *sampling, *others, "Q"]
    assert main(argv, make_client=maker(fake, made)) == 0
    assert made == [("h:1", "m")]
    assert fake.timeouts_s == [9.0]
    inputs = fake.requests[0].inputs
    system, user = json.loads(inputs["messages"][0])
    assert system == {"role": "system", "content": "S"}
    assert [part["type"] for part in user["content"]] == ["image", "image", "audio", "video", "text"]
    assert (inputs["image"], inputs["audio"]) == ([b"image", b"image"], [b"audio"])
    assert json.loads(inputs["sampling_parameters"][0]) == {"max_tokens": 7, "temperature": 0, "seed": 5}
    assert json.loads(inputs["media_parameters"][0]) == {"max_slice_nums": 4, "enable_thinking": True}
    assert inputs["stream"] is False
    output, error = capsys.readouterr()
    assert output == "ok\n"
    assert error.startswith("0 input tokens, 1 output tokens in ")


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_thinking_goes_to_stderr_when_asked_for(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [Chunk("", reasoning="A tail, "), Chunk("A ", reasoning="ears."), "cat."]
    assert run("chat", *options, "x", fake=FakeTransport(replies)) == 0
    assert capsys.readouterr() == ("A cat.\n", "")
    assert run("chat", "--thinking", *options, "x", fake=FakeTransport(replies)) == 0
    assert capsys.readouterr() == ("A cat.\n", "Thinking:\nA tail, ears.\n")
    assert run("chat", "--thinking", *options, "x", fake=FakeTransport(["None."])) == 0
    assert capsys.readouterr() == ("None.\n", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("chat", "--thinking", *options, "x", fake=FakeTransport([Chunk("!", reasoning="Hm\n")])) == 0
    assert capsys.readouterr() == ("!\n", "\x1b[2mThinking:\n\x1b[0m\x1b[2mHm\n\x1b[0m")


def test_an_error_amid_the_thinking_has_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeTransport([Chunk("", reasoning="Hm"), InvalidRequest("no")])
    assert run("chat", "--thinking", "x", fake=fake) == 1
    assert capsys.readouterr() == ("\n", "Thinking:\nHm\nminicpmo: error: no\n")


def test_timings_count_tokens_and_leave_the_first_chunk_out_of_the_rate() -> None:
    timings = Timings(started_s=10.0)
    assert timings.line(0) == "no token arrived"
    for num_tokens, now_s in ((2, 10.5), (1, 11.0), (3, 12.5)):
        timings.add(num_tokens, now_s)
    assert timings.line(9) == (
        "first token 0.500 s, 9 input tokens, 6 output tokens in 2.500 s, 2.0 tokens/s after the first chunk"
    )


@pytest.mark.parametrize("before", [[], ["A "]])
def test_an_error_is_one_line(before: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeTransport([*before, InvalidRequest("image[0]: not an image")])
    assert run("chat", "x", fake=fake) == 1
    assert capsys.readouterr() == ("A \n" if before else "", "minicpmo: error: image[0]: not an image\n")


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeTransport()
    assert run("chat", "--image", "gone.png", "x", fake=fake) == 1
    assert capsys.readouterr().err == (
        "minicpmo: error: messages[0].content[0].image: cannot read 'gone.png': No such file or directory\n"
    )
    assert fake.requests == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["chat"],
        ["chat", "a", "b"],
        ["chat", "--max-tokens", "0", "x"],
        ["chat", "--max-tokens", "1.5", "x"],
        ["chat", "--temperature", "-1", "x"],
        ["chat", "--temperature", "nan", "x"],
        ["chat", "--timeout-s", "0", "x"],
        ["ready", "--timeout-s", "-1"],
        ["chat", "--http", "--url", "h:1", "x"],
        ["embed", "--image", "x.png"],
        ["embed", "--video", "x.mp4", "-o", "x.npz"],
        ["stats", "--timeout-s", "0"],
        ["other"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(*argv, fake=FakeTransport())
    assert exit_info.value.code == 2
    assert "usage: minicpmo" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "embed", "stats", "ready"])
def test_help_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(command, "--help", fake=FakeTransport())
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = ["--url", "--http", "--model", "--timeout-s"]
    if command == "embed":
        options += ["--image", "--audio", "--max-slice-nums", "--output", "--fetch-urls"]
    if command == "stats":
        options += ["--metrics-url", "--json"]
    if command == "chat":
        options += [
            "--image",
            "--audio",
            "--video",
            "--fetch-urls",
            "--system",
            "--max-tokens",
            "--temperature",
            "--seed",
        ]
        options += ["--max-slice-nums", "--thinking", "--no-stream", "--timings"]
    for option in options:
        assert option in text
    assert "130 interrupted" in text


def test_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ready", fake=FakeTransport()) == 0
    assert capsys.readouterr().out == "model minicpmo at localhost:8001 is ready\n"
    assert run("ready", fake=FakeTransport(ready=False)) == 1
    assert capsys.readouterr().err == "minicpmo: error: model minicpmo at localhost:8001 is not ready\n"
    assert run("ready", "--timeout-s", "0.1", fake=FakeTransport(ready=False)) == 1
    assert "was not ready within 0.1 s" in capsys.readouterr().err


def test_an_interruption_cancels_and_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeTransport):
        def start(self, request: Any, timeout_s: float | None) -> Any:
            call = super().start(request, timeout_s)
            return InterruptedCall(call)

    class InterruptedCall:
        def __init__(self, call: Any) -> None:
            self.call, self.cancel, self.count = call, call.cancel, 0

        def __iter__(self) -> InterruptedCall:
            return self

        def __next__(self) -> Response:
            self.count += 1
            if self.count == 2:
                raise KeyboardInterrupt
            response: Response = next(self.call)
            return response

    fake = Interrupted(["A ", "cat"])
    assert run("chat", "x", fake=fake) == 130
    assert capsys.readouterr().out == "A \n"
    assert len(fake.cancelled) == 1


SLOW = """
import sys, time
from minicpmo_client import Client, FakeTransport
from minicpmo_client.cli import main

class Slow(FakeTransport):
    def start(self, request, timeout_s):
        call = super().start(request, timeout_s)
        class Call:
            cancel = call.cancel
            def __iter__(self): return self
            def __next__(self): time.sleep(0.1); return next(call)
        return Call()

sys.exit(main(["chat", "x"], make_client=lambda url, model: Client(transport=Slow(["word "] * 600))))
"""


def start_slow() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word ", "the first token is not printed as it comes"
    return process


def test_ctrl_c_in_a_real_process() -> None:
    process = start_slow()
    started_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert output.endswith(b"\n")
    assert error == b""
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_in_a_real_process(sent: signal.Signals, status: int) -> None:
    process = start_slow()
    process.send_signal(sent)
    output, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (status, b"")
    assert output.endswith(b"\n"), "the chat was not left in order"


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    process = start_slow()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def embedding_fake() -> FakeTransport:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    return FakeTransport(tensors={"image_embeds": rows, "audio_embeds": rows[:1]})


@pytest.fixture
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "c.wav"):
        Path(name).write_bytes(b"content")


def test_embeddings_are_written(media: None, capsys: pytest.CaptureFixture[str]) -> None:
    fake = embedding_fake()
    argv = ["--image", "a.png", "--image", "b.png", "--audio", "c.wav", "--max-slice-nums", "2"]
    assert run("embed", *argv, "-o", "out.npz", fake=fake) == 0
    with np.load("out.npz") as saved:
        assert {name: saved[name].shape for name in saved} == {
            "image_0": (3, 2),
            "image_1": (3, 2),
            "audio_0": (1, 2),
        }
    assert capsys.readouterr().out == (
        "image_0  3 x 2  a.png\nimage_1  3 x 2  b.png\naudio_0  1 x 2  c.wav\n"
    )
    assert fake.requests[0].inputs["media_parameters"] == [b'{"max_slice_nums": 2}']
    assert run("embed", "--audio", "c.wav", "-o", "one.npy", fake=embedding_fake()) == 0
    np.testing.assert_array_equal(np.load("one.npy"), [[0.0, 1.0]])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["-o", "x.npz"], "give at least one --image or --audio"),
        (
            ["--image", "a.png", "-o", "x.txt"],
            "output: expected a name that ends in .npz or .npy, got 'x.txt'",
        ),
        (["--image", "a.png", "--audio", "c.wav", "-o", "x.npy"], "output: .npy holds one array, and there"),
        (["--image", "gone.png", "-o", "x.npz"], "images[0]: cannot read 'gone.png'"),
        (["--image", "http://h/x.png", "-o", "x.npz"], "images[0]: is a URL"),
        (["--image", "a.png", "-o", "no/such/x.npz"], "output: cannot write 'no/such/x.npz': No such file"),
    ],
)
def test_what_cannot_be_embedded(
    media: None, argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("embed", *argv, fake=embedding_fake()) == 1
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"minicpmo: error: {problem}")
    assert error.count("\n") == 1


def test_options_of_the_client_itself_are_passed_on() -> None:
    made: list[Any] = []

    def make(url: str, **options: Any) -> Client:
        made.append((url, options))
        return Client(url, transport=FakeTransport(["x"]))

    assert main(["chat", "--http", "--fetch-urls", "x"], make_client=make) == 0
    assert main(["chat", "x"], make_client=make) == 0
    assert made == [
        ("http://localhost:8000", {"model": "minicpmo", "fetch_urls": True}),
        ("localhost:8001", {"model": "minicpmo"}),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_upload_shows_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicpmo_client.progress.SHOW_AFTER_S", 0.05)
    terminal = Terminal()
    with Spinner(12_345_678, terminal):
        time.sleep(0.4)
    shown = terminal.getvalue()
    assert "| 12.3 MB of media on their way, 0 s" in shown
    assert shown.endswith("\r\x1b[K"), "the line is not cleared"


def test_there_is_no_sign_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicpmo_client.progress.SHOW_AFTER_S", 0.05)
    no_terminal, without_media, short = io.StringIO(), Terminal(), Terminal()
    with Spinner(1000, no_terminal), Spinner(0, without_media):
        with Spinner(1000, short) as spinner:
            spinner.stop()
        time.sleep(0.2)
    assert no_terminal.getvalue() == without_media.getvalue() == short.getvalue() == ""


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 2**30)] == ["0 B", "1023 B", "1.0 KiB", "1.0 GiB"]
