"""Prompts that come as embeddings: there are no token ids to cut, and none to compare."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from restow.broker.core.common.keys import State
from restow.demo.recall.model import load_model
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Answer, Options
from vllm_harness.pair import MODEL, vllm_pair

pytestmark = pytest.mark.timeout(600)


async def test_prompt_embeddings(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...]
) -> None:
    table = load_model().get_input_embeddings().weight.detach()
    files = [tmp_path / f"{number}.pt" for number in range(len(prompts))]
    for file, prompt in zip(files, prompts, strict=True):
        torch.save(table[torch.tensor(prompt.token_ids)], file)
    engine = {"enable_prompt_embeds": True}
    prefill = Options(MODEL, 1, conv_layout="SD", engine=engine)
    decode = Options(MODEL, 1, conv_layout="DS", engine=engine)
    async with vllm_pair(vllm_python, tmp_path, prefill, decode, alone=False) as pair:

        async def hand_over(file: Path, prompt: Prompt) -> Answer:
            params = {"handoff_id": file.stem}
            first = pair.prefill.begin([], 1, params, embeds=str(file))
            found = await pair.decode.ask([], len(prompt.answer_ids), params, embeds=str(file))
            given = await pair.prefill.answer(first)
            assert given.params is not None
            assert given.params["remote_num_tokens"] == len(prompt.token_ids) - 1
            return found

        found = await asyncio.gather(
            *(hand_over(file, prompt) for file, prompt in zip(files, prompts, strict=True))
        )
        # Standalone engines of vLLM say these for the same prompts as tokens (test_handover.py).
        assert [one.tokens for one in found] == [one.answer_ids for one in prompts]
        assert pair.broker.hub.directory.ledger.statistics.by_state == {State.DONE: len(prompts)}
