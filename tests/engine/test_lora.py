"""LoRA adapters by name in a real engine on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from minicpmo_triton.errors import ConfigError, InvalidArgument
from minicpmo_triton.llm.engine import Engine, Generation
from tests.engine.conftest import StatsLog, write_adapter
from tests.engine.helpers import GREEDY, Make, submit


def adapted(engine: Engine, generation: Generation, name: str | None) -> Generation:
    sampling = json.dumps({**json.loads(GREEDY), "lora_name": name})
    return replace(generation, sampling=engine.sampling(sampling, generation.input_ids.size))


def tokens(engine: Engine, generation: Generation) -> list[int]:
    answer = submit(engine, generation)
    assert answer.wait() is None
    return answer.token_ids()


@pytest.mark.parametrize("name", ["text", "image_gray"])
def test_an_adapter_changes_its_own_requests(shared_engine: Engine, make_shared: Make, name: str) -> None:
    plain = make_shared(name)
    expected = tokens(shared_engine, plain)
    changed = tokens(shared_engine, adapted(shared_engine, plain, "whole"))
    assert changed != expected
    # Both spellings of the tensors' names are the same adapter, and one of scale 0 changes nothing.
    assert tokens(shared_engine, adapted(shared_engine, plain, "language")) == changed
    assert tokens(shared_engine, adapted(shared_engine, plain, "zero")) == expected
    assert tokens(shared_engine, plain) == expected


def test_adapters_side_by_side_answer_as_alone(shared_engine: Engine, make_shared: Make) -> None:
    requests = [
        adapted(shared_engine, make_shared(case), name)
        for case in ("text", "image_gray")
        for name in (None, "whole", "zero", "language")
    ]
    alone = [tokens(shared_engine, request) for request in requests]
    together = [submit(shared_engine, request) for request in requests]
    assert [answer.wait() for answer in together] == [None] * len(requests)
    assert [answer.token_ids() for answer in together] == alone


def test_the_prefix_cache_is_an_adapters_own(
    shared_engine: Engine, make_shared: Make, stats_log: StatsLog
) -> None:
    plain = make_shared("system_multi_turn")
    tokens(shared_engine, plain)
    mark = stats_log.mark()
    tokens(shared_engine, adapted(shared_engine, plain, "whole"))
    assert stats_log.since(mark).prefix_cache_hits == 0


def test_an_unknown_adapter_is_refused_with_those_there_are(shared_engine: Engine) -> None:
    with pytest.raises(InvalidArgument) as caught:
        shared_engine.sampling('{"lora_name": "nobody"}', 3)
    assert str(caught.value) == (
        "sampling_parameters.lora_name: LoRA nobody is not supported, "
        "we currently support ['whole', 'language', 'zero']"
    )


def test_an_adapter_that_does_not_fit_fails_the_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    misfit = write_adapter(tmp_path / "misfit", prefix="base_model.model.vpm.")
    config = json.loads((misfit / "adapter_config.json").read_text())
    (misfit / "adapter_config.json").write_text(json.dumps({**config, "r": 512}))
    args = {"enforce_eager": True, "max_model_len": 512, "enable_lora": True}
    with pytest.raises(ConfigError, match=r"LoRA adapter misfit cannot be loaded: .*512"):
        Engine.start(tiny_checkpoint, args, "float32", {}, lora_adapters={"misfit": misfit})
