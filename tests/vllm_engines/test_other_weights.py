"""A real vLLM takes no state of another checkpoint, however alike the two are in shape."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agent_harness.waiting import until
from restow.agents.engines.common.checkpoint import checkpoint_revision
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Answer, Options, vllm_engine
from vllm_harness.finders import END, STEPS, TELL, drawn, told
from vllm_harness.pair import GRANT_S, MODEL
from vllm_harness.stores import store

pytestmark = pytest.mark.timeout(600)
DUMMY = {"load_format": "dummy"}
TURNS = 25


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
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    prompt = prompts[0]
    async with running_broker(settings) as broker, AsyncExitStack() as stack:
        options = Options(MODEL, role="kv_consumer", broker=broker.address)
        wanted = {
            "P": replace(options, role="kv_producer"),
            "other": replace(options, model=other),
            "dummy": replace(options, engine=DUMMY),
            "named": replace(
                options, model=other, extra={"model_revision": checkpoint_revision(MODEL)}
            ),
        }
        started = await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(vllm_python, one, tmp_path / f"{name}.log"))
                for name, one in wanted.items()
            )
        )
        engines = dict(zip(wanted, started, strict=True))
        members = broker.hub.directory.members.engines.values()
        revisions = {one.layout.model.revision for one in members}
        dummy = "dummy-1234-tp1-float32-cpu"
        assert revisions == {checkpoint_revision(MODEL), checkpoint_revision(other), dummy}
        ended = broker.hub.directory.ledger.ended
        for name in ("other", "dummy", "named"):
            given = await engines["P"].ask(list(prompt.token_ids), 1, {"handoff_id": name})
            assert given.finish == "length"
            answer = await engines[name].ask(list(prompt.token_ids), 6, {"handoff_id": name})
            handoff = ended["default", name]
            if name == "named":  # the operator's word goes
                assert handoff.state is State.DONE
                continue
            assert answer.tokens == ()
            assert answer.finish == "error" or answer.error
            assert handoff.failure is not None
            assert handoff.failure.reason == "MODEL_MISMATCH"
            assert checkpoint_revision(MODEL) in handoff.failure.detail


async def test_replaced_weights_find_nothing_of_those_before(
    vllm_python: Path, tmp_path: Path
) -> None:
    # An engine and a store hold the states of conversations when the engine's weights change.
    other = trained_on(tmp_path / "other", 0.05)
    prompts = [drawn(40, seed) for seed in range(TURNS)]
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with running_broker(settings) as broker, AsyncExitStack() as stack:
        plain = Options(MODEL, prefix_caching=True)
        joined = {"role": "kv_both", "broker": broker.address, "policy": "recompute"}
        one = replace(plain, engine_id="one", extra=TELL, **joined)  # type: ignore[arg-type]
        engine, fresh = await asyncio.gather(
            *(
                stack.enter_async_context(vllm_engine(vllm_python, options, tmp_path / name))
                for name, options in (("one.log", one), ("fresh.log", replace(plain, model=other)))
            )
        )
        await stack.enter_async_context(store(broker.address, "one"))

        async def next_turns(turns: list[list[int]], said: list[Answer]) -> list[list[int]]:
            """Return turns that go on from these replies, once the store has their states."""
            each = zip(turns, said, strict=True)
            found = [[*turn, *one.tokens[:-1], END, *drawn(5, 13)] for turn, one in each]
            for turn, before in zip(found, turns, strict=True):
                await told(broker, "one", "store", turn, len(before) + STEPS - 1)
            return found

        before = [await engine.ask(ids, STEPS) for ids in prompts]
        turns = await next_turns(prompts, before)
        record = broker.hub.directory.members.engines[EngineKey("default", "one")]
        await engine.call("reload_weights", weights_path=str(other))
        assert await engine.forget(connector=True)
        await until(lambda: not record.revision.startswith("unknown"))
        assert record.revision == checkpoint_revision(other)
        after = [await engine.ask(ids, STEPS) for ids in turns]
        right = [await fresh.ask(ids, STEPS) for ids in turns]
        assert [one.tokens for one in after] == [one.tokens for one in right]
        assert [one.cached for one in after] == [0] * TURNS
        # What the new weights compute is found again, by the store.
        last = await next_turns(turns, after)
        assert await engine.forget()
        found = [await engine.ask(ids, STEPS) for ids in last]
        right = [await fresh.ask(ids, STEPS) for ids in last]
        assert [one.tokens for one in found] == [one.tokens for one in right]
        assert [one.cached for one in found] == [len(ids) + STEPS - 1 for ids in turns]
        # Weights that came from no checkpoint are known when their version is told.
        await engine.call("update_config", overrides={})
        assert await engine.forget(connector=True)
        given = await engine.ask(prompts[0], 1, {"handoff_id": "h", "do_remote_decode": True})
        assert given.params is None
        assert record.revision.startswith("unknown")
        await engine.version("7")
        await until(lambda: record.revision == f"{checkpoint_revision(MODEL)}@7")
