"""A model with sliding windows: a D that would keep half a block as a prefix is refused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from restow.agents.engines.recall.task import VOCABULARY_SIZE
from restow.broker.core.actions import State
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from vllm_harness.checkpoints import gemma3, write_checkpoint
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.pair import GRANT_S

pytestmark = pytest.mark.timeout(600)
BLOCK_TOKENS = 16
LENGTHS = (20, 58, 128)
"""Inside of a window, and such that one begins within a block, and where a block begins."""
STEPS = 12


async def test_a_d_that_would_keep_half_a_block_as_a_prefix_is_refused(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Seen without the refusal: after a prompt of 58 tokens another one with its first 32 got wrong
    tokens, and nobody was told."""
    model = write_checkpoint(gemma3, tmp_path / "model")
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    prompts = [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(count)] for count in LENGTHS]
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with running_broker(settings) as broker, AsyncExitStack() as stack:
        d = Options(model, 1, "kv_consumer", broker.address, engine={"block_size": BLOCK_TOKENS})
        log = tmp_path / "refused.log"
        with pytest.raises(RuntimeError, match="did not start"):
            await stack.enter_async_context(
                vllm_engine(vllm_python, replace(d, prefix_caching=True), log)
            )
        assert "start D with --no-enable-prefix-caching" in log.read_text()
        options = {
            "P": replace(d, role="kv_producer", prefix_caching=True),
            "D": d,
            "alone": replace(d, role=""),
        }
        engines = dict(
            zip(
                options,
                await asyncio.gather(
                    *(
                        stack.enter_async_context(
                            vllm_engine(vllm_python, one, tmp_path / f"{name}.log")
                        )
                        for name, one in options.items()
                    )
                ),
                strict=True,
            )
        )
        for number, ids in enumerate(prompts):
            params = {"handoff_id": f"h{number}"}
            first = engines["P"].begin(ids, 1, {**params, "do_remote_decode": True})
            answer = await engines["D"].ask(ids, STEPS, {**params, "do_remote_prefill": True})
            await engines["P"].answer(first)
            assert answer.tokens == (await engines["alone"].ask(ids, STEPS)).tokens, len(ids)
        counts = broker.hub.directory.ledger.statistics.by_state
    assert counts == {State.DONE: len(prompts)}
