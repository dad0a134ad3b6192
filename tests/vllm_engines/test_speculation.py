"""States with rows for tokens that are only guessed: P and D may differ in how many they keep.

D is asked for one prompt after the other: vLLM for the CPU samples wrong first tokens where several
loaded prompts are padded with drafts in one step, with its own connector as well (see
docs/vllm.md), and its convolution is mended (`vllm_harness.mended_workers`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Options
from vllm_harness.pair import MODEL, vllm_pair

pytestmark = pytest.mark.timeout(600)


def guessing(tokens: int) -> dict[str, object]:
    """Return vLLM's arguments for drafts that repeat what followed the same word before."""
    return {
        "worker_extension_cls": "vllm_harness.mended_workers.MendedWorkers",
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    }


PLAIN = Options(MODEL, 1, conv_layout="SD")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (PLAIN, Options(MODEL, 1, conv_layout="DS", engine=guessing(2))),
        (
            Options(MODEL, 1, conv_layout="SD", engine=guessing(3)),
            Options(MODEL, 1, conv_layout="SD", engine=guessing(1)),
        ),
        (Options(MODEL, 2, engine=guessing(2)), PLAIN),
    ],
    ids=["P1 0 to D1 2", "P1 3 to D1 1", "P2 2 to D1 0"],
)
async def test_guessed_tokens(
    vllm_python: Path,
    tmp_path: Path,
    prompts: tuple[Prompt, ...],
    prefill: Options,
    decode: Options,
) -> None:
    async with vllm_pair(vllm_python, tmp_path, prefill, decode) as pair:
        assert pair.alone is not None
        alone = pair.alone
        expected = await asyncio.gather(
            *(alone.ask(list(one.token_ids), len(one.answer_ids)) for one in prompts)
        )
        for number, prompt in enumerate(prompts):
            ids, params = list(prompt.token_ids), {"handoff_id": f"h{number}"}
            first = pair.prefill.begin(ids, 1, params)
            found = await pair.decode.ask(ids, len(prompt.answer_ids), params)
            await pair.prefill.answer(first)
            assert found.tokens == expected[number].tokens == prompt.answer_ids, number
        assert pair.broker.hub.directory.ledger.statistics.by_state == {State.DONE: len(prompts)}
