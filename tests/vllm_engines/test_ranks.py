"""Engines of several data-parallel ranks, and Restow as one of several connectors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.engine import PATIENT, TWO_ENGINES, Options
from vllm_harness.house import GRANT_S, MODEL, House, mixed_prompts, vllm_engines, vllm_house
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


async def check_tokens(house: House, p: str, d: str, prompts: list[list[int]]) -> None:
    """Check that D says after P what it says alone."""
    found = await asyncio.gather(
        *(house.hand_over(p, d, f"h{number}", ids) for number, ids in enumerate(prompts))
    )
    right = [await house.alone(d, ids) for ids in prompts]
    assert [one.d.tokens for one in found] == [one.tokens for one in right]
    assert house.ended == {State.DONE: len(prompts)}


async def test_each_data_parallel_rank_is_an_engine_that_hands_over_to_each(
    vllm_python: Path, tmp_path: Path
) -> None:
    wanted = {
        name: Options(MODEL, role=role, engine_id=name, **TWO_ENGINES)
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    }
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        await check_tokens(house, "p", "d", mixed_prompts()[1:])
        ended = house.broker.hub.directory.ledger.ended.values()
        sides = [one for each in ended for one in (each.source, each.destination)]
        names = {one.key.engine_id for one in sides if one is not None}
        assert names == {f"{name}_dp{rank}" for name in "pd" for rank in (0, 1)}
        members = house.broker.hub.directory.members.engines.values()
        assert [one.former for one in members if one.former] == []


def multi_connector(broker: str) -> dict[str, Any]:
    """Return a `MultiConnector` with Restow in it, without the module that Restow is in."""
    common = {"kv_role": "kv_both", "kv_buffer_device": "cpu"}
    restow = {
        **common,
        "kv_connector": "RestowConnector",
        "kv_connector_extra_config": {"broker": broker, **PATIENT},
    }
    inside = {"connectors": [restow]}
    return {**common, "kv_connector": "MultiConnector", "kv_connector_extra_config": inside}


async def test_a_multi_connector_calls_restow_by_its_name(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    async with running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker:
        engine = {"kv_transfer_config": multi_connector(broker.address)}
        wanted = {f"{tp}": Options(model, tp, engine=engine) for tp in (1, 2)}
        async with vllm_engines(vllm_python, tmp_path, wanted) as engines:
            await check_tokens(House(broker, engines), "1", "2", mixed_prompts())
