"""Restow as one of the connectors of vLLM's `MultiConnector`, which calls them by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.engine import PATIENT, Options, vllm_engine
from vllm_harness.pair import GRANT_S
from vllm_harness.three_engines import STEPS, hand_over, prompts
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


def transfer(broker: str, role: str) -> dict[str, Any]:
    """Return a `MultiConnector` with Restow in it, without the module that Restow is in."""
    restow = {
        "kv_connector": "RestowConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"broker": broker, **PATIENT},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"connectors": [restow]},
    }


async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    async with running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker:

        def engine(tp: int, role: str) -> Options:
            return Options(model, tp, engine={"kv_transfer_config": transfer(broker.address, role)})

        async with (
            vllm_engine(vllm_python, engine(1, "kv_both"), tmp_path / "p.log") as p,
            vllm_engine(vllm_python, engine(2, "kv_both"), tmp_path / "d.log") as d,
        ):
            asked = prompts()
            expected = [(await p.ask(ids, STEPS)).tokens for ids in asked]
            found = await asyncio.gather(
                *(hand_over(p, d, f"h{number}", ids) for number, ids in enumerate(asked))
            )
        counts = broker.hub.directory.ledger.statistics.by_state
    assert [one.tokens for one in found] == expected
    assert counts == {State.DONE: len(asked)}
