"""Engines with a draft (EAGLE, a small model of its own, MTP) beside engines without one.

Layers of the draft that P lacks begin cold at D; the others move. What D says is what an engine
without any draft says alone: drafts are checked, so it is their number that a cold draft changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from random import Random

import pytest

from restow.broker.core.common.keys import State
from restow.broker.layout import Layout
from restow.broker.planner import make_plan
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.draft_checkpoints import eagle_draft, mtp_model
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(1200)
STEPS = 12
EAGLE = {f"layers.4.{part}" for part in "kv"}
MODEL = {f"layers.{layer}.{part}" for layer in range(4, 8) for part in "kv"}
WAYS = {
    # P and D, and which fields begin cold at D
    ("plain", "eagle"): EAGLE,
    ("eagle", "plain"): set(),
    ("eagle", "eagle 2"): set(),
    ("plain", "eagle 2"): EAGLE,
    ("eagle 2", "model"): MODEL,
}


def prompts() -> list[list[int]]:
    """Return prompts shorter and longer than vLLM's blocks."""
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in (3, 33, 200)]


MTP_WAYS: dict[tuple[str, str], set[str]] = {
    ("plain", "mtp"): {f"layers.2.{part}" for part in "kv"},
    ("mtp", "plain"): set(),
}


def options(folder: Path, name: str, broker: str) -> Options:
    model = folder / "model"
    drafts: dict[str, dict[str, object]] = {
        "eagle": {"method": "eagle", "model": str(folder / "eagle"), "num_speculative_tokens": 2},
        "model": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2},
        "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    }
    said = drafts.get(name.removesuffix(" 2"))
    drafting: dict[str, object] = {"speculative_config": said} if said else {}
    tp = 2 if name == "eagle 2" else 1
    return Options(
        model, tp, role="kv_both", broker=broker, engine_id=name.replace(" ", "-"), engine=drafting
    )


@contextlib.asynccontextmanager
async def engines_of(
    python: Path, folder: Path, broker: RunningBroker, names: Iterable[str]
) -> AsyncIterator[dict[str, VllmEngine]]:
    names = sorted(names)
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(
                stack.enter_async_context(
                    vllm_engine(
                        python, options(folder, name, broker.address), folder / f"{name}.log"
                    )
                )
                for name in names
            )
        )
        yield dict(zip(names, started, strict=True))


def layouts(broker: RunningBroker) -> dict[str, Layout]:
    found = broker.hub.directory.members.engines.values()
    return {one.key.engine_id.replace("-", " "): one.layout for one in found}


async def hand_over(
    prefill: VllmEngine, decode: VllmEngine, handoff_id: str, ids: list[int]
) -> tuple[int, ...]:
    params = {"handoff_id": handoff_id}
    first = prefill.begin(ids, 1, {**params, "do_remote_decode": True})
    answer = await decode.ask(ids, STEPS, {**params, "do_remote_prefill": True})
    await prefill.answer(first)
    assert not answer.error
    return answer.tokens


async def test_drafts_of_one_side_or_both(vllm_python: Path, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path / "model")
    eagle_draft(tmp_path / "eagle")
    await check_ways(vllm_python, tmp_path, WAYS)


async def test_mtp_of_one_side(vllm_python: Path, tmp_path: Path) -> None:
    # The connector knows GLM-4.5 by its family, and the draft by vLLM's specs.
    mtp_model(tmp_path / "model")
    await check_ways(vllm_python, tmp_path, MTP_WAYS)


async def check_ways(python: Path, folder: Path, ways: Mapping[tuple[str, str], set[str]]) -> None:
    names = {name for way in ways for name in way}
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker,
        engines_of(python, folder, broker, names) as engines,
    ):
        asked, said = prompts(), layouts(broker)
        expected = [(await engines["plain"].ask(ids, STEPS)).tokens for ids in asked]
        assert len(set(expected)) == len(expected)
        for (p, d), cold in ways.items():
            plan = make_plan(said[p], said[d])
            assert plan.cold == cold
            drafted = {field.name for field in said[d].model.fields if field.draft}
            assert {move.field for move in plan.moves} >= drafted - cold
            for number, ids in enumerate(asked):  # one by one: see docs/vllm.md, fault 4
                found = await hand_over(engines[p], engines[d], f"{p}{d}{number}", ids)
                assert found == expected[number], (p, d, number)
        counts = broker.hub.directory.ledger.statistics.by_state
        assert counts == {State.DONE: len(ways) * len(asked)}
