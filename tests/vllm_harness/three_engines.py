"""Three engines of one model that are both P and D: two of one rank, one of two.

What is right the first one says, asked without a handoff.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

from restow.agents.engines.recall.task import VOCABULARY_SIZE
from restow.broker.core.actions import State
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S

STEPS = 12
NO_FAMILIES = {"NO_FAMILIES_IN_TESTS": "1"}
TPS = (1, 1, 2)
WAYS = [(0, 1), (0, 2), (2, 0)]
"""P and D among these: P1 to D1, P1 to D2, P2 to D1."""


def prompts() -> list[list[int]]:
    """Shorter and longer than a window of 32 tokens, and than vLLM's blocks."""
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in (3, 20, 33, 128, 200)]


async def three_engines_answers(
    python: Path, logs: Path, options: Options, first_knows: bool
) -> tuple[list[tuple[int, ...]], dict[tuple[int, int], list[tuple[int, ...]]]]:
    """Return what the first engine says alone, and what each D says after its P.

    The first engine's connector may know the type by its family; the others' never do.
    """
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker,
        _engines(python, logs, replace(options, broker=broker.address), first_knows) as engines,
    ):
        asked = prompts()
        expected = [(await engines[0].ask(ids, STEPS)).tokens for ids in asked]
        answers = {}
        for p, d in WAYS:
            answers[p, d] = await asyncio.gather(
                *(
                    hand_over(engines[p], engines[d], f"{p}{d}{number}", ids)
                    for number, ids in enumerate(asked)
                )
            )
        counts = broker.hub.directory.ledger.statistics.by_state
        assert counts == {State.DONE: len(WAYS) * len(asked)}
    return expected, answers


async def hand_over(
    prefill: VllmEngine, decode: VllmEngine, handoff_id: str, ids: list[int]
) -> tuple[int, ...]:
    """Return what D says of a prompt whose state it has from P."""
    params = {"handoff_id": handoff_id}
    first = prefill.begin(ids, 1, {**params, "do_remote_decode": True})
    answer = await decode.ask(ids, STEPS, {**params, "do_remote_prefill": True})
    await prefill.answer(first)
    assert not answer.error
    return answer.tokens


@contextlib.asynccontextmanager
async def _engines(
    python: Path, logs: Path, options: Options, first_knows: bool
) -> AsyncIterator[list[VllmEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield await asyncio.gather(
            *(
                stack.enter_async_context(
                    vllm_engine(
                        python,
                        replace(
                            options,
                            tp=tp,
                            role="kv_both",
                            environment={} if first_knows and not number else NO_FAMILIES,
                        ),
                        logs / f"{number}.log",
                    )
                )
                for number, tp in enumerate(TPS)
            )
        )
