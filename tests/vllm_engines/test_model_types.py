"""Small models of many types, whose layouts come from vLLM's own specs or from a family.

Two prefill and two decode engines of other TP, and one that serves alone, which says what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from restow.agents.engines.recall.model import checkpoint_folder
from restow.agents.engines.recall.task import VOCABULARY_SIZE
from restow.broker.core.actions import State
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(900)
STEPS = 12
ONE_GROUP = checkpoint_folder(1)
NO_FAMILIES = {"RESTOW_TEST_NO_FAMILIES": "1"}
WAYS = [("P1", "D1"), ("P1", "D2"), ("P2", "D1")]


def prompts() -> list[list[int]]:
    """Shorter and longer than a window of 32 tokens, and than vLLM's blocks."""
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in (3, 20, 33, 128, 200)]


@pytest.mark.parametrize(
    ("model_type", "without"),
    [
        ("llama", "PD"),
        ("mistral", "PD"),
        ("qwen3", "PD"),
        ("gemma2", "PD"),
        ("gemma3_text", "D"),
        ("gpt_oss", "PD"),
        ("deepseek_v2", "P"),
        ("recall", "D"),
    ],
    ids=lambda value: value,
)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, model_type: str, without: str
) -> None:
    """Of P, of D, or of both the connector does not know the model's type."""
    recall = model_type == "recall"  # Nemotron-H, with a group that every rank has whole
    options = Options(ONE_GROUP if recall else tiny_model(model_type, tmp_path / "model"))
    plain = {
        side: replace(options, environment=NO_FAMILIES if side in without else {}) for side in "PD"
    }
    wanted = {"alone": options} | {
        f"{side}{tp}": replace(
            plain[side], tp=tp, role="kv_producer" if side == "P" else "kv_consumer"
        )
        for side in "PD"
        for tp in (1, 2)
    }
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker,
        _engines(vllm_python, tmp_path, broker.address, wanted) as engines,
    ):
        asked = prompts()
        expected = [(await engines["alone"].ask(ids, STEPS)).tokens for ids in asked]
        assert len({tokens for tokens in expected}) == len(asked)
        for p, d in WAYS:
            found = await asyncio.gather(
                *(
                    _hand_over(engines[p], engines[d], f"{p}{d}{number}", ids)
                    for number, ids in enumerate(asked)
                )
            )
            assert found == expected, (p, d)
        counts = broker.hub.directory.ledger.statistics.by_state
        assert counts == {State.DONE: len(WAYS) * len(asked)}


async def _hand_over(
    prefill: VllmEngine, decode: VllmEngine, handoff_id: str, ids: list[int]
) -> tuple[int, ...]:
    params = {"handoff_id": handoff_id}
    first = prefill.begin(ids, 1, params)
    answer = await decode.ask(ids, STEPS, params)
    await prefill.answer(first)
    assert not answer.error
    return answer.tokens


@contextlib.asynccontextmanager
async def _engines(
    python: Path, logs: Path, address: str, wanted: dict[str, Options]
) -> AsyncIterator[dict[str, VllmEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(
                stack.enter_async_context(
                    vllm_engine(python, replace(one, broker=address), logs / f"{name}.log")
                )
                for name, one in wanted.items()
            )
        )
        yield dict(zip(wanted, started, strict=True))
