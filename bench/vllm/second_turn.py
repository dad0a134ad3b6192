"""The time to the first token of a conversation's second turn in real vLLM, by where the state is.

The first engine has answered the first turn. Another engine is asked for the second turn: it finds
the state at the first engine or in a store, or computes a prompt of the same length that nobody
holds. The first engine, which has the state in vLLM's own prefix cache, is measured too. All take
turns, each time with a new conversation. If RESTOW_LMCACHE_PYTHON names the interpreter of an
environment with vLLM and LMCache, two engines with LMCache's connector take turns with them for
models of attention alone; it refuses other models here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.report import Put, Row, compared
from forked.ports import free_port
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.engine import RESTING, Options, VllmEngine, vllm_engine
from vllm_harness.house import END, MODEL, TELL, House, both_sides, store, vllm_house
from vllm_harness.hybrid_checkpoints import COMMON, HYBRIDS

SUITE = "vllm-second-turn"
LMCACHE = "LMCache's server"
CHUNK_TOKENS = 256
STORED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02
NO_TRACKING = {"DO_NOT_TRACK": "1"}
"""Keeps LMCache's server from reporting its use."""
ANEW, ELSEWHERE, STORED, OWN = "computed anew", "at another engine", "in a store", "its own cache"
GOALS = {ANEW: 1 / 0.6, LMCACHE: 1.0}
REPLY_TOKENS = 16
STORE = "kept"
"""The broker asks the first holder by its name if all are equally busy."""
WARM_UP = 2
IDLE_SLEEPS = {"PYTHONPATH": RESTING["PYTHONPATH"]}
"""vLLM's workers spin for a second after each message, and would take the processors from the
engine that is measured."""


@dataclass(frozen=True)
class Case:
    """A model, and a conversation: the tokens of its first prompt and of its second question."""

    name: str
    first_tokens: int
    more_tokens: int
    model: Callable[[Path], Path]
    recurrent: bool
    engine: dict[str, Any] = field(default_factory=dict)


def llama(**more: int) -> PreTrainedModel:
    """Make a model of attention alone, of 76 M weights; ``more`` is what its config has besides."""
    wide = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    numbers = COMMON | wide | heads | {"initializer_range": 0.02, "dtype": "float32"}
    numbers |= more
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **numbers)
    )
    return made


def qwen3_next(**more: int) -> PreTrainedModel:
    """Make a hybrid model of 27 M weights; ``more`` is what its config has besides."""
    wide = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
    experts = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return HYBRIDS["qwen3_next"].make(**wide, **experts, **more)


LONG = {"max_model_len": 2048, "max_num_seqs": 4}
CASES = (
    Case(
        "llama, 76 M weights",
        *(1024, 64, lambda folder: write_checkpoint(llama, folder), False),
        LONG | {"block_size": 32},
    ),
    Case(
        "Qwen3-Next, 27 M weights",
        *(1024, 64, lambda folder: write_checkpoint(qwen3_next, folder), True),
        LONG | {"dtype": "bfloat16", "skip_tokenizer_init": False},
    ),
    Case("recall, 0.4 M weights", 64, 24, lambda _: MODEL, True),
)


@dataclass
class Measured:
    """Seconds to the first token, and how often how many tokens of the prompt were held."""

    seconds: list[float] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)


def run(put: Put, repeats: int) -> None:
    """Measure every case; RESTOW_VLLM_PYTHON names the interpreter of vLLM's environment."""
    python = Path(os.environ["RESTOW_VLLM_PYTHON"])
    for case in CASES:
        asyncio.run(_measure(put, python, case, repeats))


async def _measure(put: Put, python: Path, case: Case, repeats: int) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = Options(
            case.model(folder / "model"),
            prefix_caching=True,
            extra=TELL,
            engine=case.engine,
            environment=IDLE_SLEEPS | {"OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            resting=False,
        )
        wanted = both_sides(one=options, other=options)
        engines = await stack.enter_async_context(vllm_house(python, folder, wanted))
        lmcache = None
        if (named := os.environ.get("RESTOW_LMCACHE_PYTHON")) and not case.recurrent:
            pair = lmcache_pair(Path(named), folder, options)
            lmcache = await stack.enter_async_context(pair)
        talks = Talks(case, engines, lmcache, Random(0))  # noqa: S311
        theirs = (LMCACHE,) if lmcache else ()
        found_there = await talks.in_turns((ANEW, ELSEWHERE, OWN, *theirs), repeats)
        for other in (ANEW, OWN, *theirs):
            put(talks.row(ELSEWHERE, other, found_there))
        for way in theirs:
            put(talks.row(way, ANEW, found_there))
        await stack.enter_async_context(store(engines.broker.address, "one", STORE))
        stored = await talks.in_turns((ANEW, STORED, *theirs), repeats)
        for other in (ANEW, *theirs):
            put(talks.row(STORED, other, stored))


class Talks:
    """Conversations with the engines of a case."""

    def __init__(
        self, case: Case, engines: House, lmcache: LmcachePair | None, random: Random
    ) -> None:
        self._case, self._engines, self._lmcache, self._random = case, engines, lmcache, random
        self.tokens = case.first_tokens + REPLY_TOKENS + case.more_tokens
        """Tokens of a second prompt."""

    async def in_turns(self, ways: Sequence[str], repeats: int) -> dict[str, Measured]:
        """Measure all ways in turns."""
        measured = {way: Measured() for way in ways}
        for number in range(WARM_UP + repeats):
            for way in ways:
                seconds, held = await self._second_turn(way)
                if number >= WARM_UP:
                    measured[way].seconds.append(seconds)
                    measured[way].held[held] += 1
        return measured

    def row(self, way: str, other: str, measured: Mapping[str, Measured]) -> Row:
        """Compare two ways, and note the tokens of prompts that were not computed."""
        ours, theirs = measured[way], measured[other]
        held, others = (", ".join(map(str, times.held)) for times in (ours, theirs))
        return compared(
            SUITE,
            f"{self._case.name}: the state is {'in ' if way == LMCACHE else ''}{way}",
            ours.seconds,
            other,
            theirs.seconds,
            goal=None if way == LMCACHE else GOALS.get(other),
            note=f"{held} of {self.tokens}; {other}: {others}",
        )

    async def _second_turn(self, way: str) -> tuple[float, int]:
        """Return the seconds to the first token, and the tokens that were not computed."""
        case, engines = self._case, self._engines
        ids = self._drawn(case.first_tokens)
        if way == LMCACHE:
            return await self._at_lmcache(ids)
        answer = await engines["one"].ask(ids, REPLY_TOKENS)
        turn = [*ids, *answer.tokens[:-1], END, *self._drawn(case.more_tokens)]
        stored = STORE in {
            member.engine_id for member in engines.broker.hub.directory.members.engines
        }
        # A store must not still take this turn's state during the next.
        await self._told(STORE if stored else "one", turn, len(ids) + REPLY_TOKENS - 1)
        if way == ANEW:
            turn = self._drawn(self.tokens)
        seconds, held = await _first_token(engines["one" if way == OWN else "other"], turn)
        if way in (ELSEWHERE, STORED):
            self._check_source(STORE if way == STORED else "one")
        if stored:
            await self._told(STORE, [*turn, END], len(turn))
        return seconds, held

    async def _at_lmcache(self, ids: list[int]) -> tuple[float, int]:
        pair = self._lmcache
        if pair is None:
            raise RuntimeError(f"{LMCACHE} does not run")
        answer = await pair.first.ask(ids, REPLY_TOKENS)
        await pair.stored(len(ids))
        turn = [*ids, *answer.tokens[:-1], END, *self._drawn(self._case.more_tokens)]
        seconds, held = await _first_token(pair.second, turn)
        await pair.stored(len(turn) - held)
        return seconds, held

    def _check_source(self, wanted: str) -> None:
        for handoff in reversed(self._engines.broker.hub.directory.ledger.ended.values()):
            source, destination = handoff.source, handoff.destination
            if destination is not None and destination.key.engine_id == "other":
                if source is None or source.key.engine_id != wanted:
                    raise RuntimeError(f"the state did not come from {wanted}: {source}")
                return

    async def _told(self, name: str, ids: list[int], tokens: int) -> None:
        """Wait until an engine has reported a reply, or its whole blocks for attention alone."""
        if not self._case.recurrent:
            tokens -= tokens % self._case.engine["block_size"]
        await self._engines.told(name, ids, tokens)

    def _drawn(self, count: int) -> list[int]:
        return [self._random.randrange(8, VOCABULARY_SIZE) for _ in range(count)]


async def _first_token(engine: VllmEngine, ids: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens that were not computed."""
    began_s = time.monotonic()
    answer = await engine.ask(ids, 1)
    return answer.first_s - began_s, answer.cached


@dataclass
class LmcachePair:
    """Two vLLM engines that keep states in LMCache's server, and the server's log."""

    first: VllmEngine
    second: VllmEngine
    log: Path
    stored_tokens: int = 0

    async def stored(self, tokens: int) -> None:
        """Wait until the whole chunks of a prompt of ``tokens`` are stored."""
        self.stored_tokens += tokens // CHUNK_TOKENS * CHUNK_TOKENS
        async with asyncio.timeout(STORED_WITHIN_S):
            while self._stored_so_far() < self.stored_tokens:  # noqa: ASYNC110 - there are no events
                await asyncio.sleep(LOOK_EVERY_S)

    def _stored_so_far(self) -> int:
        return sum(map(int, re.findall(r"Stored (\d+) tokens", self.log.read_text())))


@contextlib.asynccontextmanager
async def lmcache_pair(python: Path, logs: Path, options: Options) -> AsyncIterator[LmcachePair]:
    """Run the pair with a Python that has vLLM and LMCache (docs/peers.md)."""
    port = free_port()
    words = "-m lmcache.cli.main server --l1-size-gb 2 --eviction-policy LRU"
    words += " --supported-transfer-mode auto --disable-metrics"
    ports = "--port", str(port), "--http-port", str(free_port())
    log = logs / "lmcache.log"
    pair = replace(
        options,
        connector="LMCacheMPConnector",
        role="kv_both",
        extra={"lmcache.mp.port": port},
        environment=options.environment | NO_TRACKING,
    )
    with log.open("wb") as out:
        server = await asyncio.create_subprocess_exec(
            python, *words.split(), *ports, stdout=out, stderr=out, env=os.environ | NO_TRACKING
        )
    try:
        async with contextlib.AsyncExitStack() as stack:
            first, second = await asyncio.gather(
                *(
                    stack.enter_async_context(vllm_engine(python, pair, logs / f"lmcache-{name}"))
                    for name in ("one", "other")
                )
            )
            yield LmcachePair(first, second, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        await server.wait()
