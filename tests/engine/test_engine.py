"""The language model in a real vLLM on the CPU, against the goldens' greedy tokens."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from minicpmo_triton.errors import (
    Cancelled,
    CheckpointError,
    ConfigError,
    InvalidArgument,
    MiniCPMOError,
    Unavailable,
)
from minicpmo_triton.llm.engine import Engine, Generation, Increment, read_engine_args
from tests.engine.helpers import ENDLESS, TIMEOUT_S, Answer, Arrays, Make, maker, positions, submit

REPOSITORY = Path(__file__).resolve().parents[2]
ENV = {"MINICPMO_ENGINE_ARGS": json.dumps({"enforce_eager": True, "max_model_len": 2048})}
CASES = (
    "text",
    "system_multi_turn",
    "image_small_upscaled",
    "image_sliced",
    "image_wide_sliced",
    "image_gray",
    "two_images",
    "frames",
    "audio",
    "audio_speech",
    "image_and_audio",
    "thinking",
)
#: A step whose two best logits are closer may go either way under another order of summation.
MIN_MARGIN = 0.01


def start(checkpoint: Path, env: Mapping[str, str] = ENV) -> Engine:
    args = read_engine_args(REPOSITORY / "model_repository" / "llm" / "1" / "model.json")
    return Engine.start(checkpoint, args, "float32", env)


def child_pids() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


@pytest.fixture(scope="module")
def others() -> tuple[set[int], set[threading.Thread]]:
    """Processes and threads of engines that other modules' tests have started."""
    return child_pids(), set(threading.enumerate())


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, others: object) -> Iterator[Engine]:
    torch.set_num_threads(1)
    engine = start(tiny_checkpoint)
    yield engine
    engine.shutdown()


@pytest.fixture
def make(engine: Engine, goldens: Mapping[str, Any], golden_arrays: Arrays) -> Make:
    """Make the generation of a golden case."""
    return maker(engine, goldens, golden_arrays)


def test_all_cases_are_tested(goldens: Mapping[str, Any]) -> None:
    assert set(goldens) == set(CASES)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", CASES)
def test_goldens(
    engine: Engine,
    goldens: Mapping[str, Any],
    make: Make,
    name: str,
    stream: bool,
) -> None:
    expected = goldens[name]["expected"]
    answer = submit(engine, make(name, stream))
    assert answer.wait() is None
    tokens = expected["greedy_token_ids"]
    differs = [i for i, (a, b) in enumerate(zip(answer.token_ids(), tokens, strict=True)) if a != b]
    assert not differs or expected["greedy_margin"][differs[0]] < MIN_MARGIN
    if not differs:
        # vLLM holds a character's bytes back until they are whole, at the answer's end for good.
        assert answer.text() == expected["greedy_text"].rstrip("\ufffd")
    assert answer.increments[-1].finished
    assert answer.increments[-1].finish_reasons == ("length",)
    assert {increment.num_input_tokens for increment in answer.increments} == {len(expected["input_ids"])}
    assert sum(increment.num_output_tokens[0] for increment in answer.increments) == 16
    assert (len(answer.increments) > 1) == stream


def test_twelve_at_once_answer_as_one_after_another(engine: Engine, make: Make) -> None:
    alone = []
    for name in CASES:
        answer = submit(engine, make(name))
        assert answer.wait() is None
        alone.append(answer.token_ids())
    together = [submit(engine, make(name)) for name in CASES]
    assert [answer.wait() for answer in together] == [None] * len(CASES)
    assert [answer.token_ids() for answer in together] == alone


def test_other_embeddings_under_the_same_ids_are_not_taken_from_the_prefix_cache(
    engine: Engine, make: Make
) -> None:
    one = make("image_gray")
    other = replace(one, image_embeds=one.image_embeds.flip(0))
    first = submit(engine, one)
    assert first.wait() is None
    second = submit(engine, other)
    assert second.wait() is None
    again = submit(engine, one)
    assert again.wait() is None
    assert first.token_ids() == again.token_ids() != second.token_ids()


def test_cancelling_in_mid_stream_ends_once_and_leaves_the_engine_well(
    engine: Engine, make: Make, goldens: Mapping[str, Any]
) -> None:
    answer = submit(engine, make("image_gray", sampling=ENDLESS))
    assert answer.first.wait(TIMEOUT_S)
    assert answer.handle is not None
    answer.handle.cancel()
    answer.handle.cancel()
    assert isinstance(answer.wait(), Cancelled)
    received = len(answer.increments)
    after = submit(engine, make("text"))
    assert after.wait() is None
    assert after.token_ids() == goldens["text"]["expected"]["greedy_token_ids"]
    assert len(answer.increments) == received
    assert len(answer.outcomes) == 1


def test_cancelling_before_it_starts_and_after_it_ended(engine: Engine, make: Make) -> None:
    early = submit(engine, make("text", sampling=ENDLESS))
    assert early.handle is not None
    early.handle.cancel()
    assert isinstance(early.wait(), Cancelled)
    late = submit(engine, make("text"))
    assert late.wait() is None
    assert late.handle is not None
    late.handle.cancel()
    assert submit(engine, make("text")).wait() is None
    assert late.outcomes == [None]


def test_cancelling_by_the_clients_id(engine: Engine, make: Make) -> None:
    twins = [submit(engine, make("text", sampling=ENDLESS)) for _ in range(2)]  # the same id twice
    bystander = submit(engine, make("image_gray"))
    assert engine.cancel("text") == 2
    assert all(isinstance(twin.wait(), Cancelled) for twin in twins)
    assert bystander.wait() is None
    assert engine.cancel("text") == 0


def test_an_invalid_generation_costs_only_itself(engine: Engine, make: Make) -> None:
    good = make("image_gray")
    before = submit(engine, good)
    bad = submit(engine, replace(good, image_embeds=good.image_embeds[:-1]))
    long = submit(engine, replace(make("text"), input_ids=np.full(2048, 5, np.int32)))
    error = bad.wait()
    assert isinstance(error, InvalidArgument)
    assert error.field == "image_embeds"
    assert isinstance(error := long.wait(), InvalidArgument)
    assert "2048 tokens, but the context holds 2048" in str(error)
    assert not bad.increments
    assert before.wait() is None


def test_what_vllm_refuses_late_is_the_clients_fault(engine: Engine, make: Make) -> None:
    error = submit(engine, make("text", sampling='{"logprobs": 1000}')).wait()
    assert isinstance(error, InvalidArgument)
    assert error.field == "sampling_parameters.logprobs"
    assert submit(engine, make("text")).wait() is None


def test_a_callback_that_raises_costs_only_its_request(engine: Engine, make: Make) -> None:
    answer = Answer()

    def broken(increment: Increment) -> None:
        raise RuntimeError("the client's connection is gone")

    engine.submit(make("text", sampling=ENDLESS), broken, answer.on_done)
    assert "the client's connection is gone" in str(answer.wait())
    assert submit(engine, make("text")).wait() is None


def test_several_sequences_and_their_log_probabilities(engine: Engine, make: Make) -> None:
    sampling = '{"n": 3, "seed": 1, "max_tokens": 5, "ignore_eos": true, "logprobs": 2}'
    streamed = submit(engine, make("text", sampling=sampling))
    whole = submit(engine, make("text", stream=False, sampling=sampling))
    assert streamed.wait() is None
    assert whole.wait() is None
    (increment,) = whole.increments
    assert sorted(increment.indices) == [0, 1, 2]
    assert increment.num_output_tokens == (5, 5, 5)
    for index, text, tokens, total, logprobs in zip(
        increment.indices,
        increment.texts,
        increment.token_ids,
        increment.cumulative_logprobs,
        increment.logprobs,
        strict=True,
    ):
        assert streamed.text(index) == text
        assert logprobs is not None
        chosen = [entry[str(token)]["logprob"] for entry, token in zip(logprobs, tokens, strict=True)]
        assert sum(chosen) == pytest.approx(total, abs=1e-4)
        json.dumps(logprobs, allow_nan=False)
    assert streamed.increments[-1].finished
    assert not any(part.finished for part in streamed.increments[:-1])


def test_the_answer_stops_at_the_end_of_the_context(engine: Engine, make: Make) -> None:
    ids = np.tile(make("text").input_ids, 60)[: engine.facts.max_model_len - 3]
    generation = replace(
        make("text", stream=False), input_ids=ids, sampling=engine.sampling(ENDLESS, ids.size)
    )
    answer = submit(engine, generation)
    assert answer.wait() is None
    assert answer.increments[0].num_output_tokens == (3,)
    assert answer.increments[0].finish_reasons == ("length",)


def test_shutdown_ends_requests_in_flight_and_every_process(
    engine: Engine, make: Make, others: tuple[set[int], set[threading.Thread]]
) -> None:
    """The last test of the module's engine."""
    pids = child_pids() - others[0]
    pids |= {child for pid in pids for child in children(pid)}
    assert pids
    running = submit(engine, make("text", sampling=ENDLESS))
    assert running.first.wait(TIMEOUT_S)
    engine.shutdown()
    assert isinstance(running.wait(), Unavailable)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "vllm-loop" not in {thread.name for thread in set(threading.enumerate()) - others[1]}
    assert not engine.is_alive()


# Tests below start engines of their own.


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ('{"max_modle_len": 1}', "unknown engine argument max_modle_len"),
        ('{"model": "x"}', "model cannot be set here"),
        ('{"trust_remote_code": true}', "trust_remote_code cannot be set here"),
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_engine_arguments_are_checked_by_name(tiny_checkpoint: Path, env: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny_checkpoint, {"MINICPMO_ENGINE_ARGS": env})


def test_an_engine_argument_that_vllm_refuses_comes_with_its_reason(tiny_checkpoint: Path) -> None:
    with pytest.raises(MiniCPMOError, match="block_size"):
        start(tiny_checkpoint, {"MINICPMO_ENGINE_ARGS": '{"block_size": "many"}'})


def test_a_missing_tensor_fails_the_start_with_its_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    name = "llm.model.layers.0.mlp.up_proj.weight"
    broken = spoiled(tiny_checkpoint, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name):
        start(broken)


def test_a_failure_in_the_engines_process_surfaces(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["llm.model.norm.weight"] = torch.ones(7, dtype=torch.bfloat16)

    before = child_pids()
    with pytest.raises(MiniCPMOError, match=r"vLLM could not start: .*(7|128)") as caught:
        start(spoiled(tiny_checkpoint, tmp_path, widen))
    assert "Engine core initialization failed" not in str(caught.value)
    assert child_pids() == before


def spoiled(checkpoint: Path, tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    spoil(tensors)
    save_file(tensors, broken / "model.safetensors")
    return broken


def test_a_dead_engine_is_told_and_shutdown_leaves_nothing(
    tiny_checkpoint: Path, goldens: Mapping[str, Any]
) -> None:
    before = child_pids()  # of the module's engine
    engine = start(tiny_checkpoint)
    ids = np.array(goldens["text"]["expected"]["input_ids"], np.int32)
    nothing = torch.zeros(0, engine.facts.hidden_size)
    generation = Generation(
        "", ids, positions([]), positions([]), nothing, nothing, engine.sampling(ENDLESS, ids.size), True
    )
    running = submit(engine, generation)
    assert running.first.wait(TIMEOUT_S)
    assert engine.is_alive()
    (core,) = child_pids() - before
    os.kill(core, signal.SIGKILL)
    error = running.wait()
    assert isinstance(error, Unavailable)
    assert "restart the server" in str(error)
    assert isinstance(submit(engine, generation).wait(), Unavailable)
    assert not engine.is_alive()
    engine.shutdown()
    engine.shutdown()
    assert not Path(f"/proc/{core}").exists()
    assert isinstance(submit(engine, generation).wait(), Unavailable)


_PARENT = """
import json, sys, time
from pathlib import Path
from minicpmo_triton.llm.engine import Engine
if __name__ == "__main__":
    engine = Engine.start(Path(sys.argv[1]), {"enforce_eager": True, "max_model_len": 512}, "float32", {})
    import multiprocessing
    print("pids", *(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(300)
"""


def test_the_engines_processes_end_with_a_parent_that_is_killed(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tiny_checkpoint)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.startswith("pids"))
        pids = [int(pid) for pid in line.split()[1:]]
        pids += [child for pid in pids for child in children(pid)]
        assert pids
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
