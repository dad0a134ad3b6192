"""A real vLLM decodes from another's state exactly as it would have from its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.collector import attributes, collector
from restow.broker.core.common.keys import State
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Options
from vllm_harness.house import MODEL, ONE_GROUP, STEPS, long_prompts, vllm_house

SPAN = "b7ad6b7169203331"
"""What each request came from."""
pytestmark = pytest.mark.timeout(600)
ENGINES = {
    "recall": {
        "1 SD": Options(MODEL, 1, conv_layout="SD"),
        "another 1 SD": Options(MODEL, 1, conv_layout="SD"),
        "2 DS": Options(MODEL, 2, conv_layout="DS"),
    },
    "one group": {
        "1 DS": Options(ONE_GROUP, 1, conv_layout="DS"),
        "2 DS": Options(ONE_GROUP, 2, conv_layout="DS"),
        "2 SD": Options(ONE_GROUP, 2, conv_layout="SD"),
    },
}
WAYS = {
    "recall": [("1 SD", "another 1 SD"), ("1 SD", "2 DS"), ("2 DS", "1 SD")],
    "one group": [("1 DS", "2 DS"), ("2 SD", "1 DS")],
}


@pytest.mark.parametrize("model", WAYS)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, prompts: tuple[Prompt, ...], model: str
) -> None:
    """Send all prompts at once to both sides: those of the task, and some of several blocks.

    Each request has a trace, and its handoff is a part of that trace. vLLM lets a request keep its
    trace only where it traces itself.
    """
    asked = [*(list(one.token_ids) for one in prompts), *long_prompts()]
    ways = WAYS[model]
    traces = {f"{p} to {d} {n}": "" for p, d in ways for n in range(len(asked))}
    traces = {name: f"{number:032x}" for number, name in enumerate(traces, 1)}
    async with collector() as kept:
        tracing = {"otlp_traces_endpoint": kept.address}
        engines = {
            name: replace(one, role="kv_both", engine=tracing)
            for name, one in ENGINES[model].items()
        }
        async with vllm_house(vllm_python, tmp_path, engines, otlp_endpoint=kept.address) as house:
            for p, d in ways:
                found = await asyncio.gather(
                    *(
                        house.hand_over(
                            *(p, d, name := f"{p} to {d} {number}", ids),
                            both={"trace_headers": {"traceparent": f"00-{traces[name]}-{SPAN}-01"}},
                        )
                        for number, ids in enumerate(asked)
                    )
                )
                recalled = [one.d.tokens[: len(prompts[0].answer_ids)] for one in found]
                assert recalled[: len(prompts)] == [one.answer_ids for one in prompts]
                right = [await house.alone(d, ids) for ids in asked]
                assert [one.d.tokens for one in found] == [one.tokens for one in right]
                assert all(len(one.tokens) == STEPS for one in right)
            assert house.ended == {State.DONE: len(traces)}
    wholes = kept.named("handoff")
    ids = {attributes(one)["restow.handoff.id"]: one.trace_id.hex() for one in wholes}
    assert ids == traces
    assert {one.parent_span_id.hex() for one in wholes} == {SPAN}
    # Of each, how long the reads of all ranks took is told too.
    assert len(kept.named("read")) == sum(len(asked) * engines[d].tp for _, d in ways)
