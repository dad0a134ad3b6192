"""Keys and values in float8, with one scale for a layer's keys and one for its values."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.engine import Options, vllm_engine
from vllm_harness.pair import GRANT_S
from vllm_harness.three_engines import assert_same_tokens, three_engines_answers
from vllm_harness.tiny_models import float8_kv, tiny_model

pytestmark = pytest.mark.timeout(900)
FLOAT8 = {"kv_cache_dtype": "fp8", "block_size": 32}
"""The CPU's attention has float8 in blocks of a multiple of 32 tokens."""


async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = float8_kv(tiny_model("llama", tmp_path / "model"), scale=0.05)
    expected, answers = await three_engines_answers(
        vllm_python, tmp_path, Options(model, engine=FLOAT8), knowing=1
    )
    assert_same_tokens(expected, answers)


async def test_elements_of_other_scales_are_refused(vllm_python: Path, tmp_path: Path) -> None:
    # Both sides say that they are of one checkpoint: the scales alone tell them apart.
    models = [
        float8_kv(tiny_model("llama", tmp_path / name), scale)
        for name, scale in (("p", 0.05), ("d", 0.06))
    ]
    async with running_broker(BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)) as broker:
        options = Options(
            models[0],
            role="kv_producer",
            broker=broker.address,
            extra={"model_revision": "one"},
            engine=FLOAT8,
        )
        async with (
            vllm_engine(vllm_python, options, tmp_path / "p.log") as p,
            vllm_engine(
                vllm_python,
                replace(options, model=models[1], role="kv_consumer"),
                tmp_path / "d.log",
            ) as d,
        ):
            ids = list(range(8, 60))
            params = {"handoff_id": "h"}
            first = asyncio.ensure_future(p.ask(ids, 1, {**params, "do_remote_decode": True}))
            answer = await d.ask(ids, 4, {**params, "do_remote_prefill": True})
            await first
        assert answer.tokens == ()
        (ended,) = broker.hub.directory.ledger.ended.values()
        assert ended.failure is not None
        assert ended.failure.reason == "SCALES_MISMATCH"
        assert "static k 0.05" in ended.failure.detail
