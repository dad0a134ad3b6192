"""LoRA adapters over engines that find each other's prefixes: those of one are no other's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.core.common.keys import State
from vllm_harness.adapters import RANK, write_adapter
from vllm_harness.engine import Options
from vllm_harness.finders import STEPS, TELL, Finders, drawn, finders
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
Loras = Mapping[str, Mapping[str, tuple[str, int, str]]]


async def loaded(found: Finders, loras: Loras) -> None:
    """Have both engines load their adapters: nothing is known of a name that was never loaded."""
    for name, given in loras.items():
        for lora in given.values():
            asked = found.one if name == "one" else found.other
            await asked.ask(drawn(8, seed=99), 1, lora=lora)


async def test_two_adapters_and_the_model_itself_never_meet(
    vllm_python: Path, tmp_path: Path
) -> None:
    # Two engines answer one prompt with the model itself and with each adapter. At the second
    # engine the first adapter has another name, number and folder, and counts as the same adapter.
    model = tiny_model("llama", tmp_path / "model")
    folders = [write_adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    copied = shutil.copytree(folders[0], tmp_path / "copied")
    word = {"model": "", "first": checkpoint_revision(folders[0], whole=True)}
    word["second"] = checkpoint_revision(folders[1], whole=True)
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
        await loaded(found, loras)
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


async def test_an_adapter_that_was_replaced_and_loaded_again_is_nobodys(
    vllm_python: Path, tmp_path: Path
) -> None:
    # To load another adapter, vLLM displaces this one, and later reads its folder anew. The other
    # engine still has the first weights, and finds nothing of the second weights under their word.
    model = tiny_model("llama", tmp_path / "model")
    first, second, third = (write_adapter(model, tmp_path / f"{s}", s) for s in (1, 2, 3))
    live = shutil.copytree(first, tmp_path / "live")
    engine = {"block_size": 32, "enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
    options = Options(model, 1, prefix_caching=True, extra=TELL, engine=engine)
    ids, own = drawn(150), ("a", 1, str(live))
    async with finders(vllm_python, tmp_path, options, options) as found:
        await loaded(found, {"one": {"a": own}, "other": {"a": ("x", 3, str(first))}})
        old = await found.alone.ask(ids, STEPS, lora=("b", 2, str(first)))
        new = await found.alone.ask(ids, STEPS, lora=("c", 3, str(second)))
        assert old.tokens != new.tokens
        shutil.copytree(second, live, dirs_exist_ok=True)
        await found.one.ask(drawn(8, seed=99), 1, lora=("d", 4, str(third)))
        assert (await found.one.ask(ids, STEPS, lora=own)).tokens == new.tokens
        said = await found.other.ask(ids, STEPS, lora=("x", 3, str(first)))
        assert (said.tokens, said.cached) == (old.tokens, 0)
        assert found.ended == {}
