"""States that engines of TP 1, 2 and 4 have left in a store, used by engines of TP 1, 2 and 4.

Each TP in both conv layouts, each state by all of them: what is said then is what an engine says
that serves alone, of the TP of the one that was asked (vLLM rounds otherwise at another TP).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.house import (
    END,
    GRANT_S,
    ONE_GROUP,
    STEPS,
    TELL,
    House,
    both_sides,
    drawn,
    forgotten,
    store,
)
from vllm_harness.hybrid_checkpoints import HYBRIDS

TPS, LAYOUTS = (1, 2, 4), ("SD", "DS")
QUESTION = drawn(20, 13)
"""Of the next turn, the same one for all: what is said then differs by the state alone."""
SMALL = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "skip_tokenizer_init": False}
"""Six engines have fourteen ranks in the memory of one machine."""

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Case:
    """How long the prompts are whose states are stored, and how the model is run."""

    lengths: tuple[int, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    """Whether the same tokens are said, whoever has computed the state."""


CASES = {
    # One group of B/C, of which each rank has all: vLLM parts no two groups among four ranks. Its
    # prompts fit into a block (docs/vllm.md, fault 1).
    "recall": Case((40, 75)),
    # The longer one fills a block, and a part of the next one.
    "qwen3_next": Case((60, 420), {"max_model_len": 1024, "dtype": "bfloat16"}, exact=False),
}


@dataclass(frozen=True)
class Turn:
    """The next turn after a reply, the state of whose end is stored."""

    ids: list[int]
    held_tokens: int


@pytest.mark.parametrize("kind", CASES)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, kind: str
) -> None:
    case = CASES[kind]
    model = ONE_GROUP
    if kind != "recall":
        model = write_checkpoint(HYBRIDS[kind].make, tmp_path / "model")
    more = TELL | {"staging_mb": 16}
    one = Options(model, prefix_caching=True, extra=more, engine={**SMALL, **case.engine})
    async with _started(vllm_python, tmp_path, one) as house, store(house.broker.address, "tp1-SD"):
        turns: list[Turn] = []
        for name in house.engines:
            turns += await _stored(house, name, case, len(turns))
        for engine in house.engines.values():
            # It tells that all is evicted at the step of another request.
            await forgotten(engine)
            await engine.ask([END], 1)
        ended = house.broker.hub.directory.ledger.ended
        stored = Counter(ended)
        answers = {
            name: [await engine.ask(turn.ids, STEPS, logprobs=2) for turn in turns]
            for name, engine in house.engines.items()
        }
        used = Counter(
            (one.source.key.engine_id, one.destination.key.engine_id, one.state)
            for key, one in ended.items()
            if key not in stored and one.source is not None and one.destination is not None
        )
        for name, found in answers.items():
            assert [one.cached for one in found] == [turn.held_tokens for turn in turns], name
            # And not from an engine that has forgotten it.
            assert used["store", name, State.DONE] == len(turns), used
        for tp in TPS:
            right = [await house.alone(f"tp{tp}-SD", turn.ids, logprobs=2) for turn in turns]
            assert len({one.tokens for one in right}) == len(turns)
            for layout in LAYOUTS:
                found = answers[f"tp{tp}-{layout}"]
                print(f"used by TP {tp} {layout}:", end=" ")
                if case.exact:
                    assert [one.tokens for one in found] == [one.tokens for one in right]
                    print(f"{len(found)} replies of {STEPS} tokens")
                else:
                    assert assert_alike(found, right) > len(turns) * STEPS / 2


@contextlib.asynccontextmanager
async def _started(python: Path, logs: Path, one: Options) -> AsyncIterator[House]:
    """Start all six engines, one after the other: each engine's ranks keep a machine busy."""
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with running_broker(settings) as broker, contextlib.AsyncExitStack() as stack:
        one = replace(one, broker=broker.address)
        wanted = both_sides(
            **{
                f"tp{tp}-{layout}": replace(one, tp=tp, conv_layout=layout)
                for tp, layout in itertools.product(TPS, LAYOUTS)
            }
        )
        engines: dict[str, VllmEngine] = {}
        for name, options in wanted.items():
            starting = vllm_engine(python, options, logs / f"{name}.log")
            engines[name] = await stack.enter_async_context(starting)
        yield House(broker, engines)


async def _stored(house: House, name: str, case: Case, seed: int) -> list[Turn]:
    """Have an engine reply to prompts of its own, and the store keep the states at the ends."""
    turns = []
    for number, length in enumerate(case.lengths, 100 + seed):
        ids = drawn(length, number)
        said = await house[name].ask(ids, STEPS, logprobs=2)
        assert said.cached == 0
        next_ids = [*ids, *said.tokens[:-1], END, *QUESTION]
        turns.append(Turn(next_ids, length + STEPS - 1))
    for turn in turns:
        await house.told("store", turn.ids, turn.held_tokens, asking=name)
    return turns
