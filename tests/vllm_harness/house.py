"""A broker and engines of vLLM, running, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import uuid4

from agent_harness.waiting import until
from restow.broker.client import AsyncAdminClient, chain_of
from restow.broker.core.common.keys import State
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.demo.recall.model import checkpoint_folder
from restow.demo.recall.task import (
    KEY_WORDS,
    VALUE_WORDS,
    VOCABULARY_SIZE,
    ask,
    encode,
    state_facts,
)
from vllm_harness.engine import START_S, Answer, Options, VllmEngine, vllm_engine

MODEL = checkpoint_folder()
ONE_GROUP = checkpoint_folder(1)
"""A group that every rank holds whole: what vLLM's own connector cuts wrongly."""
STEPS = 12
GRANT_S = 120.0
LOST_S = 60.0
SOON_S = 60.0
TELL = {"prefix": "find+tell", "find_ms": 10_000}
"""A machine with few processors may keep the broker from one for longer than 50 ms."""
END = 2
"""The token that ends a reply: it stands in the next turn's prompt."""


def drawn(count: int, seed: int = 11) -> list[int]:
    """Draw ``count`` tokens, the same ones every time."""
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    return [rng.randrange(8, VOCABULARY_SIZE) for _ in range(count)]


def mixed_prompts() -> list[list[int]]:
    """Return prompts of lengths around those that matter.

    They are shorter and longer than a convolution's window, than one of 32 tokens, than vLLM's
    blocks, and than what scans compute at once.
    """
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    lengths = (2, 7, 20, 33, 128, 200)
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in lengths]


def long_prompts() -> list[list[int]]:
    """Return prompts of the recall model of 128 to 166 tokens, where a block holds 128.

    Some begin alike, and some end early.
    """
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    values = [rng.choice(VALUE_WORDS) for _ in KEY_WORDS]
    facts = state_facts(dict(zip(KEY_WORDS, values, strict=True)))
    asked = [rng.sample(KEY_WORDS, 3) for _ in range(4)]
    whole = [encode(" ".join([*facts, *ask(keys)])) for keys in asked]
    return [list(one) for one in (*whole, whole[0][:140], whole[1][:128], whole[2][:129])]


class Handed(NamedTuple):
    """What P and D said to a prompt whose state was handed over."""

    p: Answer
    d: Answer


@dataclass(frozen=True)
class House:
    """A broker and engines by name."""

    broker: RunningBroker
    engines: Mapping[str, VllmEngine]

    def __getitem__(self, name: str) -> VllmEngine:
        return self.engines[name]

    @property
    def ended(self) -> Counter[State]:
        """Count the handoffs that have ended, by state."""
        return Counter(self.broker.hub.directory.ledger.statistics.by_state)

    async def hand_over(
        self,
        p: str,
        d: str,
        handoff_id: str,
        ids: Sequence[int],
        steps: int = STEPS,
        *,
        both: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Handed:
        """Return what P and D say to a prompt that P computes; they are asked at once.

        ``both`` is what both are asked besides, ``more`` what D is.
        """
        params, both = {"handoff_id": handoff_id}, both or {}
        given = self[p].begin([*ids], 1, {**params, "do_remote_decode": True}, **both)
        asked = {**params, "do_remote_prefill": True}
        answer = await self[d].ask([*ids], steps, asked, **both, **more)
        first = await self[p].answer(given)
        assert [first.error, answer.error] == ["", ""]
        return Handed(first, answer)

    async def alone(self, name: str, ids: list[int], steps: int = STEPS, **more: Any) -> Answer:
        """Return what an engine says that computes all of a prompt: of its salt nothing is known.

        Ask after handoffs of the prompt, so that no block has the right state before them.
        """
        answer = await self[name].ask(ids, steps, salt=uuid4().hex, **more)
        assert (answer.error, answer.cached) == ("", 0)
        return answer

    async def told(
        self, name: str, ids: list[int], tokens: int, adapter: str = "", asking: str = "other"
    ) -> None:
        """Wait until an engine has told that it holds a state that the engine ``asking`` may use.

        The state is that of the first ``tokens``, computed with the adapter of the word
        ``adapter``.
        """
        ends = [tokens] if tokens % 16 else []
        chain = chain_of(ids[: tokens + 1], adapter=adapter, ends_tokens=ends)
        async with AsyncAdminClient(self.broker.address) as client, asyncio.timeout(SOON_S):
            while True:
                (holders,) = await client.find([chain], engine_id=asking)
                if any((one.engine_id, one.tokens) == (name, tokens) for one in holders):
                    return

    async def leave(self, name: str) -> None:
        """Have an engine hand over what it holds, and stop it."""
        async with AsyncAdminClient(self.broker.address) as client, asyncio.timeout(SOON_S):
            while await client.drain_engine(name):  # noqa: ASYNC110 - the broker tells no events
                await asyncio.sleep(0.05)
        await self[name].close()

    async def deserted(self) -> None:
        """Wait until an engine that was killed is lost to the broker: then its memory is gone.

        A process gives up its memory before its connections, and both take a while.
        """
        known = self.broker.hub.directory.members.engines.values()
        await until(lambda: any(not (one.has_session or one.agents) for one in known), LOST_S)


async def forgotten(engine: VllmEngine, connector: bool = False) -> None:
    """Have an engine reset its prefix cache, as soon as nobody reads from it."""
    async with asyncio.timeout(SOON_S):
        while not await engine.forget(connector):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def vllm_house(
    python: Path, logs: Path, wanted: Mapping[str, Options], **settings: Any
) -> AsyncIterator[House]:
    """Start a broker, and all engines at once; they are told the broker's address.

    ``settings`` are the broker's. When this context ends, all traces have been sent.
    """
    told = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S, **settings)
    async with running_broker(told) as broker:
        joined = {name: replace(one, broker=broker.address) for name, one in wanted.items()}
        async with vllm_engines(python, logs, joined) as engines:
            house = House(broker, engines)
            try:
                yield house
            except BaseException as error:
                error.add_note(_story(house, logs))
                raise


@contextlib.asynccontextmanager
async def vllm_engines(
    python: Path, logs: Path, wanted: Mapping[str, Options]
) -> AsyncIterator[dict[str, VllmEngine]]:
    """Start engines at once; each writes what it says to a log of its name."""
    async with contextlib.AsyncExitStack() as stack:
        begun = [
            stack.enter_async_context(vllm_engine(python, one, logs / f"{name}.log"))
            for name, one in wanted.items()
        ]
        yield dict(zip(wanted, await asyncio.gather(*begun), strict=True))


def both_sides(**wanted: Options) -> dict[str, Options]:
    """Return engines that are both P and D, of these ids; what they miss they compute."""
    more: dict[str, Any] = {"role": "kv_both", "policy": "recompute"}
    return {name: replace(one, engine_id=name, **more) for name, one in wanted.items()}


@contextlib.asynccontextmanager
async def store(broker: str, engine_id: str, name: str = "store") -> AsyncIterator[None]:
    """Run a store for the model of an engine, under a name, and wait until it is ready."""
    words = ["store", "--engine", engine_id, "--engine-id", name, "--memory", "1GiB"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "restow.broker.cli.main", *words, "--broker", broker),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(START_S):
            while "store ready" not in "".join(said[-1:]):
                said.append((await process.stderr.readline()).decode())
                assert said[-1], said
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()


def _story(house: House, logs: Path) -> str:
    """Return what explains a failed test: how handoffs ended, and what engines complained of."""
    ended = house.broker.hub.directory.ledger.ended.values()
    failures = Counter(
        f"{one.failure.reason}: {one.failure.detail}" for one in ended if one.failure is not None
    )
    lines = [f"{count} x {failure}" for failure, count in failures.items()]
    for log in sorted(logs.glob("*.log")):
        words = log.read_text(errors="replace").splitlines()
        lines += [f"{log.stem}: {line[:300]}" for line in words if _is_complaint(line)][-12:]
    return "\n".join(lines)


def _is_complaint(line: str) -> bool:
    return "[warning" in line or "[error" in line or "ERROR" in line
