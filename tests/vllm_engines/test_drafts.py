"""Engines that guess tokens: by n-grams, by a draft (EAGLE, a small model, MTP), or on one side.

Layers of the draft that P lacks begin cold at D; the others move. What D says is what an engine
without any draft says alone: drafts are checked, so it is their number that a cold draft changes.
States of recurrent layers have rows for guessed tokens, and P and D may differ in how many.

D is asked for one prompt after the other: vLLM for the CPU samples wrong first tokens where several
loaded prompts are padded with drafts in one step, with its own connector as well (see
docs/vllm.md), and its convolution is mended (`vllm_harness.mended_workers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from restow.broker.planner import make_plan
from restow.demo.recall.task import Prompt
from vllm_harness.draft_checkpoints import eagle_draft, mtp_model
from vllm_harness.engine import Options
from vllm_harness.house import MODEL as RECALL
from vllm_harness.house import mixed_prompts, vllm_house
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(1200)
EAGLE = {f"layers.4.{part}" for part in "kv"}
MODEL = {f"layers.{layer}.{part}" for layer in range(4, 8) for part in "kv"}
WAYS = {
    # P and D, and which fields begin cold at D
    ("plain", "eagle"): EAGLE,
    ("eagle", "plain"): set(),
    ("eagle", "eagle-2"): set(),
    ("plain", "eagle-2"): EAGLE,
    ("eagle-2", "model"): MODEL,
}


MTP_WAYS: dict[tuple[str, str], set[str]] = {
    ("plain", "mtp"): {f"layers.2.{part}" for part in "kv"},
    ("mtp", "plain"): set(),
}


def options(folder: Path, name: str) -> Options:
    model = folder / "model"
    drafts: dict[str, dict[str, object]] = {
        "eagle": {"method": "eagle", "model": str(folder / "eagle"), "num_speculative_tokens": 2},
        "model": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2},
        "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    }
    said = drafts.get(name.removesuffix("-2"))
    drafting: dict[str, object] = {"speculative_config": said} if said else {}
    tp = 2 if name == "eagle-2" else 1
    return Options(model, tp, role="kv_both", engine_id=name, engine=drafting)


async def test_drafts_of_one_side_or_both(vllm_python: Path, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path / "model")
    eagle_draft(tmp_path / "eagle")
    await check_ways(vllm_python, tmp_path, WAYS)


async def test_mtp_of_one_side(vllm_python: Path, tmp_path: Path) -> None:
    # The connector knows GLM-4.5 by its family, and the draft by vLLM's specs.
    mtp_model(tmp_path / "model")
    await check_ways(vllm_python, tmp_path, MTP_WAYS)


async def check_ways(python: Path, folder: Path, ways: Mapping[tuple[str, str], set[str]]) -> None:
    wanted = {name: options(folder, name) for way in ways for name in way}
    async with vllm_house(python, folder, wanted) as house:
        members = house.broker.hub.directory.members.engines.values()
        layouts = {one.key.engine_id: one.layout for one in members}
        asked = [mixed_prompts()[at] for at in (1, 3, 5)]  # shorter and longer than vLLM's blocks
        found = {}
        for (p, d), cold in ways.items():
            plan = make_plan(layouts[p], layouts[d])
            assert plan.cold == cold
            drafted = {field.name for field in layouts[d].model.fields if field.draft}
            assert {move.field for move in plan.moves} >= drafted - cold
            handed = [
                await house.hand_over(p, d, f"{p} {d} {number}", ids)
                for number, ids in enumerate(asked)
            ]
            found[p, d] = [one.d.tokens for one in handed]
        right = [(await house.alone("plain", ids)).tokens for ids in asked]
        assert len({*right}) == len(right)
        assert found == dict.fromkeys(ways, right)
        assert house.ended == {State.DONE: len(ways) * len(asked)}


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


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Options(RECALL), Options(RECALL, conv_layout="DS", engine=guessing(2))),
        (Options(RECALL, engine=guessing(3)), Options(RECALL, engine=guessing(1))),
        (Options(RECALL, 2, engine=guessing(2)), Options(RECALL)),
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
    wanted = {"P": replace(prefill, role="kv_producer"), "D": replace(decode, role="kv_consumer")}
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        for number, prompt in enumerate(prompts):
            steps = len(prompt.answer_ids)
            found = await house.hand_over("P", "D", f"h{number}", prompt.token_ids, steps)
            assert found.d.tokens == prompt.answer_ids, number
        assert house.ended == {State.DONE: len(prompts)}
