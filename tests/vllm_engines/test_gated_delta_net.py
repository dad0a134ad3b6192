"""Another family of hybrid models, with prefix caching: P and D each hold some of what came before.

In vLLM for the CPU it computes in bfloat16 only, and prefilling a token rounds otherwise than
decoding it. So where the engine that serves alone hardly preferred its token, another may be right.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from restow.broker.core.common.keys import State
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Answer, Options
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import vllm_pair

pytestmark = pytest.mark.timeout(600)
STEPS = 12


def prompts() -> list[list[int]]:
    """Return a prompt, the same prompt repeated, longer and shorter, and other prompts.

    Some of the others begin like the first prompt, and the last of them does not.
    """
    rng = Random(3)  # noqa: S311 - reproducible, not secret

    def some(count: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY_SIZE) for _ in range(count)]

    first = some(900)
    return [
        first[:400],
        first[:400],
        first[:500],
        first[:386],
        first[:385],
        first[:384],
        first[:300] + some(130),
        first[:390] + some(40),
        first[:800],
        first[:900],
        first[:760] + some(60),
        some(40),
    ]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
async def test_prefix_caching(
    vllm_python: Path, tmp_path: Path, prefill_tp: int, decode_tp: int
) -> None:
    model = write_checkpoint(HYBRIDS["qwen3_next"].make, tmp_path / "model")
    engine = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
    prefill = Options(model, prefill_tp, prefix_caching=True, engine=engine)
    decode = Options(model, decode_tp, prefix_caching=True, engine=engine)
    async with vllm_pair(vllm_python, tmp_path, prefill, decode) as pair:
        alone = pair.alone
        assert alone is not None

        async def hand_over(name: str, ids: list[int]) -> tuple[Answer, Answer]:
            params = {"handoff_id": name}
            first = pair.prefill.begin(ids, 1, params)
            answer = await pair.decode.ask(ids, STEPS, params, logprobs=2)
            return answer, await pair.prefill.answer(first)

        asked = prompts()
        expected = [await alone.ask(ids, STEPS, logprobs=2) for ids in asked]
        one_by_one = [await hand_over(f"one{i}", ids) for i, ids in enumerate(asked)]
        at_once = await asyncio.gather(*(hand_over(f"all{i}", ids) for i, ids in enumerate(asked)))
        for found in (one_by_one, at_once):
            answers = [answer for answer, _ in found]
            assert assert_alike(answers, expected) > len(asked) * STEPS / 2
        cached = [(d.cached, p.cached) for d, p in one_by_one]
        print("not computed by D and by P:", cached)
        # D asked P for all but one token, also where its keys of earlier prompts reach that far.
        assert [d for d, _ in cached] == [len(ids) - 1 for ids in asked]
        # What P had is told by vLLM's blocks, which it chooses by the processor (256 tokens, or
        # 384), and it may keep none of its first request.
        assert sum(p > 0 for _, p in cached) >= 4
        assert cached[0][1] == cached[-1][1] == 0
        ended = pair.broker.hub.directory.ledger.ended
        reasons = {name: one.failure and one.failure.reason for (_, name), one in ended.items()}
        assert {reason for reason in reasons.values() if reason} <= {"DECLINED"}
        assert reasons["one0"] is None
        counts = pair.broker.hub.directory.ledger.statistics.by_state
        assert counts[State.DONE] + counts[State.CANCELLED] == 2 * len(asked)
