"""A real vLLM takes no state of another checkpoint, however alike the two are in shape."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agent_harness.waiting import until
from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.core.common.keys import EngineKey, State
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Answer, Options
from vllm_harness.house import (
    END,
    MODEL,
    STEPS,
    TELL,
    both_sides,
    drawn,
    forgotten,
    store,
    vllm_house,
)

pytestmark = pytest.mark.timeout(600)
TURNS = 100


def trained_on(folder: Path, far: float = 1e-3) -> Path:
    """Write the recall model's checkpoint with other weights."""
    shutil.copytree(MODEL, folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor + far for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


async def test_other_weights_are_refused(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...]
) -> None:
    # Three engines would take the state by its shapes: with other weights, with dummy weights, and
    # with other weights that the operator calls the same.
    other = trained_on(tmp_path / "other")
    ids, revision = list(prompts[0].token_ids), checkpoint_revision(MODEL)
    d = Options(MODEL, role="kv_consumer")
    wanted = {
        "P": replace(d, role="kv_producer"),
        "other": replace(d, model=other),
        "dummy": replace(d, engine={"load_format": "dummy"}),
        "named": replace(d, model=other, extra={"model_revision": revision}),
    }
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        members = house.broker.hub.directory.members.engines.values()
        revisions = {one.layout.model.revision for one in members}
        dummy = "dummy-1234-tp1-float32-cpu"
        assert revisions == {revision, checkpoint_revision(other), dummy}
        for name in ("other", "dummy", "named"):
            given = await house["P"].ask(ids, 1, {"handoff_id": name})
            assert given.finish == "length"
            answer = await house[name].ask(ids, 6, {"handoff_id": name})
            handoff = house.broker.hub.directory.ledger.ended["default", name]
            if name == "named":  # the operator's word goes
                assert handoff.state is State.DONE
                continue
            assert answer.tokens == ()
            assert answer.finish == "error" or answer.error
            assert handoff.failure is not None
            assert handoff.failure.reason == "MODEL_MISMATCH"
            assert revision in handoff.failure.detail


async def test_replaced_weights_find_nothing_of_those_before(
    vllm_python: Path, tmp_path: Path
) -> None:
    # An engine and a store hold the states of conversations when the engine's weights change.
    other = trained_on(tmp_path / "other", 0.05)
    prompts = [drawn(40, seed) for seed in range(TURNS)]
    wanted = both_sides(one=Options(MODEL, prefix_caching=True, extra=TELL))
    async with (
        vllm_house(vllm_python, tmp_path, wanted) as house,
        store(house.broker.address, "one"),
    ):
        engine = house["one"]

        async def next_turns(turns: list[list[int]], said: list[Answer]) -> list[list[int]]:
            """Return turns that go on from these replies, once the store has their states."""
            each = zip(turns, said, strict=True)
            found = [[*turn, *one.tokens[:-1], END, *drawn(5, 13)] for turn, one in each]
            for turn, before in zip(found, turns, strict=True):
                await house.told("store", turn, len(before) + STEPS - 1, asking="one")
            return found

        before = [await engine.ask(ids, STEPS) for ids in prompts]
        turns = await next_turns(prompts, before)
        record = house.broker.hub.directory.members.engines[EngineKey("default", "one")]
        await engine.call("reload_weights", weights_path=str(other))
        await forgotten(engine, connector=True)
        await until(lambda: not record.revision.startswith("unknown"))
        assert record.revision == checkpoint_revision(other)
        after = [await engine.ask(ids, STEPS) for ids in turns]
        right = [await house.alone("one", ids) for ids in turns]
        assert [one.tokens for one in after] == [one.tokens for one in right]
        assert [one.cached for one in after] == [0] * TURNS
        assert (await house.alone("one", prompts[0])).tokens != before[0].tokens
        # What the new weights compute is found again, by the store.
        last = await next_turns(turns, after)
        await forgotten(engine)
        found = [await engine.ask(ids, STEPS) for ids in last]
        right = [await house.alone("one", ids) for ids in last]
        assert [one.tokens for one in found] == [one.tokens for one in right]
        assert [one.cached for one in found] == [len(ids) + STEPS - 1 for ids in turns]
        # Weights that came from no checkpoint are known when their version is told.
        await engine.call("update_config", overrides={})
        await forgotten(engine, connector=True)
        given = await engine.ask(prompts[0], 1, {"handoff_id": "h", "do_remote_decode": True})
        assert given.params is None
        assert record.revision.startswith("unknown")
        await engine.version("7")
        await until(lambda: record.revision == f"{checkpoint_revision(MODEL)}@7")
