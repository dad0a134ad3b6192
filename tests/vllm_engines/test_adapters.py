"""LoRA adapters over engines that find each other's prefixes: those of one are no other's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.core.actions import State
from vllm_harness.adapters import RANK, write_adapter
from vllm_harness.engine import Options
from vllm_harness.finders import STEPS, TELL, drawn, finders
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


async def test_two_adapters_and_the_model_itself_never_meet(
    vllm_python: Path, tmp_path: Path
) -> None:
    """The same prompt of each, at two engines. At the other one the first adapter has another name,
    number and folder, and is the same all the same."""
    model = tiny_model("llama", tmp_path / "model")
    folders = [write_adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    copied = shutil.copytree(folders[0], tmp_path / "copied")
    word = {"model": "", "first": checkpoint_revision(folders[0])}
    word["second"] = checkpoint_revision(folders[1])
    engine = {"block_size": 32, "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    options = Options(model, 1, prefix_caching=True, extra=TELL, engine=engine)
    ids = drawn(150)
    async with finders(vllm_python, tmp_path, options, options) as found:
        given = {"first": ("a", 1, str(folders[0])), "second": ("b", 2, str(folders[1]))}
        loras = {"one": given, "other": given | {"first": ("x", 3, str(copied))}}
        right = {
            who: (await found.alone.ask(ids, STEPS, lora=given.get(who))).tokens for who in word
        }
        assert len(set(right.values())) == len(word)
        for name, who, held in (
            ("one", "model", 0),
            ("other", "first", 0),
            ("one", "second", 0),
            ("one", "first", 128),
            ("other", "model", 128),
            ("other", "second", 128),
        ):
            asked = found.one if name == "one" else found.other
            said = await asked.ask(ids, STEPS, lora=loras[name].get(who))
            assert (who, said.tokens, said.cached) == (who, right[who], held)
            await found.told(name, ids, 128, word[who])
        assert found.ended == {State.DONE: 3}
