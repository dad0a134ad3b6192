"""A broker that is not there yet, goes, and comes back; D computes what it does not get."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from agent_harness.waiting import until
from forked.ports import free_port
from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.task import Prompt
from vllm_harness.engine import START_S, Answer, Options
from vllm_harness.house import GRANT_S, MODEL, House, vllm_engines

pytestmark = pytest.mark.timeout(600)
BACK_S = 60.0
"""Engines pause up to 7.5 s between tries, and a small machine may stand still meanwhile."""


def served(address: str) -> contextlib.AbstractAsyncContextManager[RunningBroker]:
    return running_broker(BrokerSettings(listen=address, grant_s=GRANT_S))


async def hand_over(
    house: House, prompt: Prompt, handoff_id: str, timeout_ms: int = 60_000
) -> Answer:
    params = {"handoff_id": handoff_id, "timeout_ms": timeout_ms}
    first = house["P"].begin(list(prompt.token_ids), 1, params)
    answer = await house["D"].ask(list(prompt.token_ids), len(prompt.answer_ids), params)
    await house["P"].answer(first)
    return answer


async def test_engines_outlive_their_broker(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    one = Options(MODEL, broker=address, extra={"connect_timeout_s": START_S})
    wanted = {
        "P": replace(one, role="kv_producer"),
        "D": replace(one, role="kv_consumer", policy="recompute"),
    }
    logs = [tmp_path / "P.log", tmp_path / "D.log"]
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(
            stack.enter_async_context(vllm_engines(vllm_python, tmp_path, wanted))
        )
        waits = b"the broker is not there yet"
        await until(lambda: all(waits in _words(log) for log in logs), START_S)
        async with served(address) as broker:
            house = House(broker, await starting)
            d = house["D"]
            answers = [await hand_over(house, one, f"a{i}") for i, one in enumerate(prompts[:3])]
            assert [one.tokens for one in answers] == [one.answer_ids for one in prompts[:3]]
            assert house.ended[State.DONE] == 3
            ids = list(prompts[3].token_ids)
            lost = await d.ask(ids, 6, {"handoff_id": "nowhere", "timeout_ms": 1000})
            assert lost.tokens == prompts[3].answer_ids
            no_use = await d.ask(ids, 6, {"handoff_id": 7})
            assert no_use.tokens == prompts[3].answer_ids
            assert b"handoff_id is 7" in _words(logs[1])
            assert house.ended[State.DONE] == 3
        # Nobody is there to say that no state comes: D gives up by itself.
        answer = await hand_over(house, prompts[4], "meanwhile", timeout_ms=1000)
        assert answer.tokens == prompts[4].answer_ids
        assert b"BROKER_SILENT" in _words(logs[1])
        async with served(address) as broker:
            house = House(broker, house.engines)
            members = broker.hub.directory.members.engines
            await until(lambda: [one.complete for one in members.values()] == [True] * 2, BACK_S)
            answers = [await hand_over(house, one, f"b{i}") for i, one in enumerate(prompts[:3])]
            assert [one.tokens for one in answers] == [one.answer_ids for one in prompts[:3]]
            assert house.ended[State.DONE] == 3
            ids = list(prompts[5].token_ids)
            given = await house["P"].ask(ids, 1, {"do_remote_decode": True})
            house["P"].kill()
            await house.deserted()
            answer = await d.ask(ids, 6, given.params)
            assert answer.tokens == prompts[5].answer_ids
            assert house.ended[State.DONE] == 3


def _words(log: Path) -> bytes:
    return log.read_bytes() if log.exists() else b""
