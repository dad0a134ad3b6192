"""LoRA adapters over engines that find each other's prefixes: those of one are no other's."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.core.common.keys import State
from vllm_harness.adapters import RANK, write_adapter
from vllm_harness.engine import Options
from vllm_harness.house import STEPS, TELL, House, both_sides, drawn, vllm_house
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
Lora = tuple[str, int, str]


@dataclass(frozen=True)
class Adapted:
    """Two engines of a model, and folders of three adapters of it.

    An engine keeps one adapter: vLLM displaces it for another one, and reads its folder anew.
    """

    house: House
    folders: tuple[Path, ...]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model("llama", folder / "model")
    adapters = tuple(write_adapter(model, folder / f"{seed}", seed) for seed in (1, 2, 3))
    engine = {"block_size": 32, "enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
    one = Options(model, prefix_caching=True, extra=TELL, engine=engine)
    async with vllm_house(vllm_python, folder, both_sides(one=one, other=one)) as house:
        yield Adapted(house, adapters)


async def load(house: House, loras: Mapping[str, Mapping[str, Lora]]) -> None:
    """Have engines load their adapters: nothing is known of a name that was never loaded."""
    for name, given in loras.items():
        for lora in given.values():
            await house[name].ask(drawn(8, seed=99), 1, lora=lora)


async def test_two_adapters_and_the_model_itself_never_meet(
    adapted: Adapted, tmp_path: Path
) -> None:
    # Two engines answer one prompt with the model itself and with each adapter. At the second
    # engine the first adapter has another name, number and folder, and counts as the same adapter.
    house, (first, second, _) = adapted.house, adapted.folders
    copied = shutil.copytree(first, tmp_path / "copied")
    word = {"model": "", "first": checkpoint_revision(first, whole=True)}
    word["second"] = checkpoint_revision(second, whole=True)
    given = {"first": ("a", 1, str(first)), "second": ("b", 2, str(second))}
    loras = {"one": given, "other": given | {"first": ("x", 3, str(copied))}}
    await load(house, loras)
    ids = drawn(150)
    found = {}
    for name, who, held in (
        ("one", "model", 0),
        ("other", "first", 0),
        ("one", "second", 0),
        ("one", "first", 128),
        ("other", "model", 128),
        ("other", "second", 128),
    ):
        said = await house[name].ask(ids, STEPS, lora=loras[name].get(who))
        assert said.cached == held, (name, who)
        found[name, who] = said.tokens
        await house.told(name, ids, 128, word[who])
    assert house.ended == {State.DONE: 3}
    right = {who: (await house.alone("one", ids, lora=given.get(who))).tokens for who in word}
    assert len({*right.values()}) == len(word)
    assert found == {(name, who): right[who] for name, who in found}


async def test_an_adapter_that_was_replaced_and_loaded_again_is_nobodys(
    adapted: Adapted, tmp_path: Path
) -> None:
    # The other engine still has the first weights, and finds nothing of the second weights under
    # their word.
    house, (first, second, third) = adapted.house, adapted.folders
    live, before = shutil.copytree(first, tmp_path / "live"), house.ended
    own, same = ("live", 11, str(live)), ("same", 12, str(first))
    await load(house, {"one": {"": own}, "other": {"": same}})
    shutil.copytree(second, live, dirs_exist_ok=True)
    await load(house, {"one": {"": ("third", 13, str(third))}})
    ids = drawn(150, 12)
    new = await house["one"].ask(ids, STEPS, lora=own)
    old = await house["other"].ask(ids, STEPS, lora=same)
    assert (new.cached, old.cached) == (0, 0)
    assert house.ended == before
    right = {
        folder: (await house.alone("one", ids, lora=(folder.name, 20 + at, str(folder)))).tokens
        for at, folder in enumerate((first, second))
    }
    assert [old.tokens, new.tokens] == [*right.values()]
    assert len({*right.values()}) == 2
