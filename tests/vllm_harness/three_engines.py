"""Three engines of one model that are both P and D: two of one rank, one of two.

What is right the first one says, asked without a handoff.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.engine import Answer, Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S

STEPS = 12
NO_FAMILIES = {"NO_FAMILIES_IN_TESTS": "1"}
TPS = (1, 1, 2)
WAYS = [(0, 1), (0, 2), (2, 0)]
"""P and D among these: P1 to D1, P1 to D2, P2 to D1."""


def prompts() -> list[list[int]]:
    """Return prompts of lengths around those that matter.

    They are shorter and longer than a convolution's window, than one of 32 tokens, than vLLM's
    blocks, and than what scans compute at once.
    """
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    lengths = (2, 7, 20, 33, 128, 200)
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in lengths]


async def three_engines_answers(
    python: Path, logs: Path, options: Options, knowing: int
) -> tuple[list[Answer], dict[tuple[int, int], list[Answer]]]:
    """Return what the first engine says alone, and what each D says after its P.

    The first ``knowing`` engines know the type by its family, the others by what vLLM says alone.
    """
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker,
        _engines(python, logs, replace(options, broker=broker.address), knowing) as engines,
    ):
        asked = prompts()
        expected = [await engines[0].ask(ids, STEPS, logprobs=2) for ids in asked]
        assert len({one.tokens for one in expected}) == len(asked)
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
) -> Answer:
    """Return what D says of a prompt whose state it has from P."""
    params = {"handoff_id": handoff_id}
    first = prefill.begin(ids, 1, {**params, "do_remote_decode": True})
    answer = await decode.ask(ids, STEPS, {**params, "do_remote_prefill": True}, logprobs=2)
    await prefill.answer(first)
    assert not answer.error
    assert answer.cached >= len(ids) - 1  # of a model of the rule of N-1 the last one is computed
    return answer


def assert_same_tokens(
    expected: Sequence[Answer], answers: Mapping[tuple[int, int], Sequence[Answer]]
) -> None:
    """Fail unless every D says the tokens of the engine that was asked alone."""
    assert set(answers) == set(WAYS)
    right = [one.tokens for one in expected]
    for way, found in answers.items():
        assert [one.tokens for one in found] == right, way


@contextlib.asynccontextmanager
async def _engines(
    python: Path, logs: Path, options: Options, knowing: int
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
                            environment={} if number < knowing else NO_FAMILIES,
                        ),
                        logs / f"{number}.log",
                    )
                )
                for number, tp in enumerate(TPS)
            )
        )
