"""Data parallelism: each of an engine's ranks is an engine of its own to the broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.pair import GRANT_S, MODEL
from vllm_harness.three_engines import STEPS, hand_over, prompts

pytestmark = pytest.mark.timeout(600)
RANKS = {"data_parallel_size": 2}


async def test_each_rank_hands_over_to_each(vllm_python: Path, tmp_path: Path) -> None:
    async with running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker:

        def engine(role: str) -> Options:
            return Options(MODEL, role=role, broker=broker.address, engine_id=role, engine=RANKS)

        async with (
            vllm_engine(vllm_python, engine("kv_producer"), tmp_path / "p.log") as p,
            vllm_engine(vllm_python, engine("kv_consumer"), tmp_path / "d.log") as d,
        ):
            asked = prompts()[1:]
            expected = [(await d.ask(ids, STEPS)).tokens for ids in asked]
            found = await asyncio.gather(
                *(hand_over(p, d, f"h{number}", ids) for number, ids in enumerate(asked))
            )
        ended = list(broker.hub.directory.ledger.ended.values())
    assert [one.tokens for one in found] == expected
    assert [one.state for one in ended] == [State.DONE] * len(asked)
    sides = [one for each in ended for one in (each.source, each.destination)]
    engines = {one.key.engine_id for one in sides if one is not None}
    assert engines == {
        f"kv_{role}_dp{rank}" for role in ("producer", "consumer") for rank in (0, 1)
    }
