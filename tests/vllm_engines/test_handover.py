"""A real vLLM decodes from another's state exactly as it would have from its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.collector import attributes, collector
from restow.broker.core.common.keys import State
from restow.demo.recall.model import checkpoint_folder
from restow.demo.recall.task import Prompt
from vllm_harness.engine import Answer, Options
from vllm_harness.pair import MODEL, vllm_pair

ONE_GROUP = checkpoint_folder(1)
"""A group that every rank holds whole: what vLLM's own connector cuts wrongly."""
SPAN = "b7ad6b7169203331"
"""What each request came from."""
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Options(MODEL, 1, conv_layout="SD"), Options(MODEL, 1, conv_layout="SD")),
        (Options(MODEL, 1, conv_layout="SD"), Options(MODEL, 2, conv_layout="DS")),
        (Options(MODEL, 2, conv_layout="DS"), Options(MODEL, 1, conv_layout="SD")),
        (Options(ONE_GROUP, 1, conv_layout="DS"), Options(ONE_GROUP, 2, conv_layout="DS")),
        (Options(ONE_GROUP, 2, conv_layout="SD"), Options(ONE_GROUP, 1, conv_layout="DS")),
    ],
    ids=[
        "P1 SD to D1 SD",
        "P1 SD to D2 DS",
        "P2 DS to D1 SD",
        "one group, P1 DS to D2 DS",
        "one group, P2 SD to D1 DS",
    ],
)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path,
    tmp_path: Path,
    prompts: tuple[Prompt, ...],
    prefill: Options,
    decode: Options,
) -> None:
    """Send all prompts at once to both sides, with nothing but a handoff id.

    Each request has a trace, and its handoff is a part of that trace.
    """
    async with (
        collector() as kept,
        vllm_pair(
            vllm_python,
            tmp_path,
            _tracing(prefill, kept.address),
            _tracing(decode, kept.address),
            otlp_endpoint=kept.address,
        ) as pair,
    ):
        assert pair.alone is not None

        async def hand_over(number: int, prompt: Prompt) -> Answer:
            ids, params = list(prompt.token_ids), {"handoff_id": f"h{number}"}
            more = {"trace_headers": {"traceparent": f"00-{_trace(number)}-{SPAN}-01"}}
            first = pair.prefill.begin(ids, 1, params, **more)
            answer = await pair.decode.ask(ids, len(prompt.answer_ids), params, **more)
            given = await pair.prefill.answer(first)
            assert given.params is not None
            assert given.params["remote_num_tokens"] == len(ids) - 1
            return answer

        expected = [
            await pair.alone.ask(list(prompt.token_ids), len(prompt.answer_ids))
            for prompt in prompts
        ]
        found = await asyncio.gather(*(hand_over(i, one) for i, one in enumerate(prompts)))
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        wanted = [prompt.answer_ids for prompt in prompts]
        for name, answers in (("alone", expected), ("handed over", found)):
            recalled = sum(one.tokens == ids for one, ids in zip(answers, wanted, strict=True))
            print(f"{name}: {recalled} of {len(wanted)} recalled")
            assert recalled == len(wanted)
        assert pair.broker.hub.directory.ledger.statistics.by_state == {State.DONE: len(prompts)}
    wholes = kept.named("handoff")
    assert {attributes(one)["restow.handoff.id"]: one.trace_id.hex() for one in wholes} == {
        f"h{number}": _trace(number) for number in range(len(prompts))
    }
    assert {one.parent_span_id.hex() for one in wholes} == {SPAN}
    # Of each, how long the reads of all ranks took is told too.
    assert len(kept.named("read")) == len(prompts) * decode.tp


def _tracing(options: Options, endpoint: str) -> Options:
    """Return the same options with tracing.

    vLLM lets a request keep its trace only where it traces itself.
    """
    return replace(options, engine={**options.engine, "otlp_traces_endpoint": endpoint})


def _trace(number: int) -> str:
    """Return the trace id of a request."""
    return f"{number + 1:032x}"
