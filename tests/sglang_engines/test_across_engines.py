"""One store for vLLM and SGLang: what one computed, the other one has, by content.

vLLM is real. Of SGLang its pools, its cache and its linker are; transformers, which is neither
engine, says what a state is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from restow.demo.recall.model import load_model
from sglang_harness.engine import sglang_engine
from sglang_harness.truth import write_truth
from vllm_harness.engine import Options
from vllm_harness.house import (
    END,
    MODEL,
    STEPS,
    TELL,
    both_sides,
    drawn,
    forgotten,
    store,
    vllm_house,
)

pytestmark = pytest.mark.timeout(600)
CLOSE = 1e-3
QUESTION = drawn(20, 13)


async def test_states_go_from_vllm_to_sglang_and_back(
    vllm_python: Path, packages: Path, tmp_path: Path
) -> None:
    one = Options(MODEL, prefix_caching=True, extra=TELL | {"staging_mb": 16})
    truth, ids, back = tmp_path / "truth", drawn(64, 21), drawn(46, 22)
    truth.mkdir()
    async with (
        vllm_house(vllm_python, tmp_path, both_sides(vllm=one)) as house,
        store(house.broker.address, "vllm"),
    ):
        said = await house["vllm"].ask(ids, STEPS)
        reply = [*ids, *said.tokens[:-1]]
        turns = [[*tokens, END, *QUESTION] for tokens in (reply, back)]
        await house.told("store", turns[0], len(reply), asking="vllm")
        for tokens in (reply, back):
            write_truth(load_model(), tokens, truth)
        await forgotten(house["vllm"])
        await house["vllm"].ask([END], 1)  # it tells that all is evicted at its next step
        for tp in (1, 2):
            with sglang_engine(
                *(packages, tmp_path, MODEL, house.broker.address),
                tp=tp,
                page=1,
                name=f"sglang{tp}",
                truth=str(truth),
                close=CLOSE,
            ) as engine:
                await asyncio.to_thread(engine.each, "start")
                got = await asyncio.to_thread(engine.all, "load", tokens=turns[0])
                print(f"TP {tp}: {got}")
                assert (got["found"], got["landed"], got["wrong"]) == (len(reply), True, [])
                if tp == 2:
                    put = await asyncio.to_thread(engine.all, "compute", tokens=back)
                    done = await asyncio.to_thread(engine.all, "settle")
                    assert (put, done) == ({"offloads": 1}, {"taken": [True]})
        answer = await house["vllm"].ask(turns[1], STEPS)
        assert answer.cached == len(back)
        assert answer.tokens == (await house.alone("vllm", turns[1])).tokens
