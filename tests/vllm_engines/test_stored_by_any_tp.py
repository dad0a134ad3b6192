"""States that engines of TP 1, 2 and 4 have left in a store, used by engines of TP 1, 2 and 4.

Each TP in both conv layouts, each state by all of them: what is said then is what an engine says
that serves alone, of the TP of the one that was asked (vLLM rounds otherwise at another TP).
"""

from __future__ import annotations

import asyncio
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
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.model import checkpoint_folder
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options, VllmEngine, vllm_engine
from vllm_harness.finders import END, SOON_S, STEPS, TELL, drawn, told
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import GRANT_S
from vllm_harness.stores import store

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
    "qwen3_next": Case(
        (60, 420),
        {"max_model_len": 1024, "dtype": "bfloat16"},
        exact=False,
    ),
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
    if kind == "recall":
        model = checkpoint_folder(1)
    else:
        model = write_checkpoint(HYBRIDS[kind].make, tmp_path / "model")
    one = Options(model, prefix_caching=True, engine={**SMALL, **case.engine})
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with (
        running_broker(settings) as broker,
        _engines(vllm_python, tmp_path, one, broker.address) as engines,
        store(broker.address, "tp1-SD"),
    ):
        turns: list[Turn] = []
        for name, engine in engines.items():
            turns += await _stored(broker, name, engine, case, len(turns))
        for engine in engines.values():
            await _forget(engine)
        stored = Counter(broker.hub.directory.ledger.ended)
        answers = {
            name: [await engine.ask(turn.ids, STEPS, logprobs=2) for turn in turns]
            for name, engine in engines.items()
        }
        used = Counter(
            (one.source.key.engine_id, one.destination.key.engine_id, one.state)
            for key, one in broker.hub.directory.ledger.ended.items()
            if key not in stored and one.source is not None and one.destination is not None
        )
    for name, found in answers.items():
        assert [one.cached for one in found] == [turn.held_tokens for turn in turns], name
        # And not from an engine that has forgotten it.
        assert used["store", name, State.DONE] == len(turns), used
    for tp in TPS:
        alone = replace(one, tp=tp, prefix_caching=False)
        async with vllm_engine(vllm_python, alone, tmp_path / f"alone-tp{tp}.log") as engine:
            right = [await engine.ask(turn.ids, STEPS, logprobs=2) for turn in turns]
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
async def _engines(
    python: Path, logs: Path, one: Options, broker: str
) -> AsyncIterator[dict[str, VllmEngine]]:
    """Start all six engines, one after the other: each engine's ranks keep a machine busy."""
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, VllmEngine] = {}
        for tp, layout in itertools.product(TPS, LAYOUTS):
            name = f"tp{tp}-{layout}"
            options = replace(
                one,
                tp=tp,
                conv_layout=layout,
                role="kv_both",
                broker=broker,
                policy="recompute",
                engine_id=name,
                extra=TELL | {"staging_mb": 16},
            )
            engines[name] = await stack.enter_async_context(
                vllm_engine(python, options, logs / f"{name}.log")
            )
        yield engines


async def _stored(
    broker: RunningBroker, name: str, engine: VllmEngine, case: Case, seed: int
) -> list[Turn]:
    """Have an engine reply to prompts of its own, and the store keep the states at the ends."""
    turns = []
    for number, length in enumerate(case.lengths, 100 + seed):
        ids = drawn(length, number)
        said = await engine.ask(ids, STEPS, logprobs=2)
        assert said.cached == 0
        next_ids = [*ids, *said.tokens[:-1], END, *QUESTION]
        turns.append(Turn(next_ids, length + STEPS - 1))
    for turn in turns:
        await told(broker, name, "store", turn.ids, turn.held_tokens)
    return turns


async def _forget(engine: VllmEngine) -> None:
    """Have an engine evict everything, and tell so at the step of another request."""
    async with asyncio.timeout(SOON_S):
        while not await engine.forget():  # noqa: ASYNC110 - the store may still be reading
            await asyncio.sleep(0.05)
    await engine.ask([END], 1)
