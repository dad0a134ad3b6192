"""Models with sliding windows whose D keeps what arrived: it finds whole blocks, and right ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.engine import Answer, Options, VllmEngine, vllm_engine
from vllm_harness.pair import GRANT_S
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
BLOCK_TOKENS = 32
"""As many as in a window, which so begins within a block nearly always."""
LENGTHS = (20, 58, 127, 128)
"""Inside of a window; such that the window of the last token begins within a block, and with the
last or the first token of one."""
STEPS = 12


@dataclass
class Engines:
    """A P and a D that keep prefixes, and one that serves alone and keeps none."""

    p: VllmEngine
    d: VllmEngine
    alone: VllmEngine
    handoffs: int = 0

    async def hand_over(self, ids: list[int]) -> Answer:
        """Return D's answer to a prompt that P computes."""
        self.handoffs += 1
        params = {"handoff_id": f"h{self.handoffs}"}
        first = self.p.begin(ids, 1, {**params, "do_remote_decode": True})
        answer = await self.d.ask(ids, STEPS, {**params, "do_remote_prefill": True})
        await self.p.answer(first)
        return answer

    async def check_prefix(self, ids: list[int]) -> None:
        """Ask D alone for another prompt that begins with all full blocks of an arrived prompt."""
        shared = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        other = ids[:shared] + ids[:9]
        answer = await self.d.ask(other, STEPS)
        assert answer.tokens == await self.right(other), len(ids)
        assert answer.cached == shared

    async def right(self, ids: list[int]) -> tuple[int, ...]:
        """Return what the engine that serves alone answers, without any handoff or prefix."""
        return (await self.alone.ask(ids, STEPS)).tokens


async def test_d_finds_what_arrived_as_prefixes(vllm_python: Path, tmp_path: Path) -> None:
    # When blocks were filled only from where a window begins, a prompt that shares 96 tokens with a
    # prompt of 120 got wrong tokens.
    rng = Random(7)  # noqa: S311 - reproducible, not secret

    def drawn(count: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY_SIZE) for _ in range(count)]

    model = tiny_model("gemma3_text", tmp_path / "model")
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with running_broker(settings) as broker:
        d = Options(model, 1, "kv_consumer", broker.address, engine={"block_size": BLOCK_TOKENS})
        keeping = replace(d, prefix_caching=True)
        options = replace(keeping, role="kv_producer"), keeping, replace(d, role="")
        async with _engines(vllm_python, options, tmp_path) as engines:
            prompts = [drawn(count) for count in LENGTHS]
            for ids in prompts:
                assert (await engines.hand_over(ids)).tokens == await engines.right(ids), len(ids)
            for ids in prompts[1:3]:
                await engines.check_prefix(ids)
            # Of this prompt P has a part already, and null blocks before that.
            known = drawn(120)
            await engines.p.ask(known[:110], 1)
            assert (await engines.hand_over(known)).tokens == await engines.right(known)
            await engines.check_prefix(known)
            # Of this one D has a part, and loads the rest.
            longer = prompts[2][:100] + drawn(30)
            answer = await engines.hand_over(longer)
            assert answer.tokens == await engines.right(longer)
            assert answer.cached == len(longer) - 1
    counts = broker.hub.directory.ledger.statistics.by_state
    assert counts == {State.DONE: len(prompts) + 2}


@asynccontextmanager
async def _engines(
    python: Path, options: Sequence[Options], folder: Path
) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        begun = [
            stack.enter_async_context(vllm_engine(python, one, folder / f"{number}.log"))
            for number, one in enumerate(options)
        ]
        p, d, alone = await asyncio.gather(*begun)
        yield Engines(p, d, alone)
