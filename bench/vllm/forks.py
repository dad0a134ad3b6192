"""One state, many continuations: forks over four engines, and agents that mark their prompts.

**Forks.** The engine ``one`` has computed a long prompt with a mark at its end. Continuations with
different last tokens are asked at once, in turns of four engines of two TP sizes and two layouts of
windows; ``one`` is the last of them, and has the state itself. The same number of prompts of the
same length that nobody holds is asked of the same engines, and so are prompts that begin alike at
each engine, but not across engines: there vLLM's own cache is all that helps.

**Agents.** Each agent has a session of `CALLS` tool calls; the prompt of a call is everything said
so far and the result of the last tool, and all agents share the system prompt with the definitions
of the tools. Each call goes to one of two engines at random, as from a router that balances. A
store keeps what engines tell it. Each cache has room for about three whole sessions, so the states
of a session are evicted between its calls, as where an engine has more sessions than memory. Marks
stand at the end of the system prompt and at the end of each prompt. The blocks have 96 tokens, to a
session of 3,500 about what blocks of 544 tokens (Qwen3-Next-80B) are to one of 20,000.

A reply stands in the next prompt as it was said, or in other tokens, as many: that is so where a
template renders a tool call anew, or leaves out what the model thought. Tokens count as computed
again if an earlier prompt or reply of any session had them at this place: the prompt's tokens
without those that the engine did not compute, and without the new ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from transformers import PreTrainedModel

from bench.report import Put, Row, compared
from bench.vllm.second_turn import qwen3_next
from restow.broker.core.common.keys import State
from restow.broker.core.handoffs.handoff import Handoff
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.engine import Options
from vllm_harness.house import END, TELL, House, both_sides, drawn, store, vllm_house

SUITE = "vllm-moves"
HYBRID = "Qwen3-Next, 27 M weights"
LONGEST_TOKENS = 16_384
STAGING_MB = 256
"""More than any of these states have: a state that has no room in it is computed anew."""
HYBRID_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": False,
    "block_size": 32,
}
"""vLLM makes blocks of it as large as a recurrent state, in steps of ``block_size``."""
OTHER: dict[str, Any] = {"tp": 2, "conv_layout": "DS"}
"""What the second of two engines differs in."""
FORKS = (1, 4, 16)
FORK_GOAL = 10.0
PREFIX_TOKENS, OWN_TOKENS = 4096, 32
PLACES = ("two", "three", "four", "one")
"""The engines in the order in which they are asked."""
WARM_UP = 1
AGENTS, CALLS, AT_ONCE = 8, 20, 2
SYSTEM_TOKENS, QUESTION_TOKENS, REPLY_TOKENS = 1024, 64, 24
RESULT_TOKENS = (32, 160)
"""The least and the most tokens of a tool's result."""
TOOL_S = 0.3
"""How long a tool runs."""
AGAIN_GOAL = 5.0
AGENT_BLOCKS = 160


def hybrid() -> PreTrainedModel:
    """Make a model whose states vLLM keeps every 96 tokens."""
    return qwen3_next(max_position_embeddings=LONGEST_TOKENS, num_key_value_heads=8)


@asynccontextmanager
async def engines_of(
    python: Path,
    make: Callable[[], PreTrainedModel],
    wanted: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
) -> AsyncIterator[House]:
    """Start engines of a model; ``wanted`` has what each differs in, ``engine`` what all are told.

    An engine has TP 1 and windows in the layout SD unless it differs in that.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint(make, folder / "model")
        extra = TELL | {"staging_mb": STAGING_MB}
        all_of_them = Options(model, prefix_caching=True, extra=extra)
        options = {
            name: replace(all_of_them, **{**more, "engine": {**engine, **more.get("engine", {})}})
            for name, more in wanted.items()
        }
        async with vllm_house(python, folder, both_sides(**options)) as house:
            yield house


def handoffs(house: House, after: int = 0) -> list[Handoff]:
    """Return the handoffs that have ended, in order, without the first ``after``."""
    return list(house.broker.hub.directory.ledger.ended.values())[after:]


# -- forks ----------------------------------------------------------------------------------------


FORKED, ANEW, OWN_CACHES = WAYS = "forked", "computed anew", "vLLM's own caches"


@dataclass
class Forked:
    """What some continuations of a prefix took, until all had their first token.

    ``seconds`` are by way, ``reads`` has how often each engine has read the state, by round, and
    ``held`` counts the tokens of prompts that were not computed.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    reads: list[Counter[str]] = field(default_factory=list)
    bytes_read: int = 0
    held: set[int] = field(default_factory=set)


async def forks(put: Put, python: Path, repeats: int) -> None:
    """Measure continuations of one prefix at four engines."""
    wanted: dict[str, dict[str, Any]] = {
        "one": {},
        "two": OTHER,
        "three": {"conv_layout": "DS"},
        "four": {"tp": 2},
    }
    engine = HYBRID_ENGINE | {"max_model_len": PREFIX_TOKENS + 256, "max_num_seqs": 16}
    times = {count: Forked() for count in FORKS}
    async with engines_of(python, hybrid, wanted, engine) as house:
        for number in range(WARM_UP + repeats):
            for count in FORKS:
                # Nothing is noted of the rounds that warm up.
                forked = times[count] if number >= WARM_UP else Forked()
                await _fork(house, drawn(PREFIX_TOKENS, number * 100 + count), count, forked)
    for count, forked in times.items():
        for row in _fork_rows(count, forked):
            put(row)


async def _fork(house: House, ids: list[int], count: int, forked: Forked) -> None:
    """Continue a prefix that the first engine has computed, and do without Restow what it does."""
    marks = {"marks": [PREFIX_TOKENS]}
    first = await house["one"].ask([*ids, *drawn(OWN_TOKENS, 999)], 1, marks)
    (kept,) = (first.params or {})["marks"]
    await house.told("one", ids, kept, asking="two")
    before = len(handoffs(house))
    seconds, held = await _continue(house, ids, [""] * count)
    forked.seconds[FORKED].append(seconds)
    forked.held |= held
    done = [one for one in handoffs(house, before) if one.state is State.DONE]
    readers = [one.destination.key.engine_id for one in done if one.destination is not None]
    forked.reads.append(Counter(readers))
    forked.bytes_read += sum(one.bytes_read for one in done)
    salts = [uuid4().hex for _ in range(count)]
    alike = [f"{salts[0]} {number % len(PLACES)}" for number in range(count)]
    for way, asked in ((ANEW, salts), (OWN_CACHES, alike)):
        seconds, _ = await _continue(house, ids, asked)
        forked.seconds[way].append(seconds)


async def _continue(house: House, ids: list[int], salts: Sequence[str]) -> tuple[float, set[int]]:
    """Return the seconds until a continuation for each salt has its first token.

    Also return how many tokens were not computed.
    """
    began_s = time.monotonic()
    answers = await asyncio.gather(
        *(
            house[PLACES[number % len(PLACES)]].ask(
                [*ids, *drawn(OWN_TOKENS, 1000 + number)], 1, salt=salt
            )
            for number, salt in enumerate(salts)
        )
    )
    if failed := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(failed[0])
    seconds = max(answer.first_s for answer in answers) - began_s
    return seconds, {answer.cached for answer in answers}


def _fork_rows(count: int, forked: Forked) -> Iterator[Row]:
    most = {name: max(reads[name] for reads in forked.reads) for name in PLACES}
    each = ", ".join(f"{name} {reads}" for name, reads in most.items())
    mb = forked.bytes_read / len(forked.reads) / 1e6
    held = ", ".join(map(str, sorted(forked.held)))
    note = f"{held} of {PREFIX_TOKENS + OWN_TOKENS} held; reads, at most: {each}; {mb:.1f} MB"
    case = f"{HYBRID}: {count} of one prefix over 4 engines, until all have a token"
    for other, goal in ((ANEW, FORK_GOAL), (OWN_CACHES, None)):
        ours, theirs = forked.seconds[FORKED], forked.seconds[other]
        yield compared(SUITE, case, ours, other, theirs, goal=goal, note=note)


# -- agents ---------------------------------------------------------------------------------------


@dataclass
class Counted:
    """Tokens of prompts: all, those that are new, and those that were computed again."""

    tokens: int = 0
    new: int = 0
    again: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a session: the question, the engine that is asked, and the reply's other tokens."""

    question: list[int]
    place: str
    rendered: list[int]


async def agents(put: Put, python: Path, repeats: int) -> None:
    """Count what agents compute again, with marks and without, replies as said and rendered."""
    wanted: dict[str, dict[str, Any]] = {"one": {}, "other": OTHER}
    room = {"max_model_len": 4096, "max_num_seqs": 4, "num_gpu_blocks_override": AGENT_BLOCKS}
    for rendered in (False, True):
        counted = {True: Counted(), False: Counted()}
        for repeat in range(max(repeats // 5, 1)):
            for marked in (True, False):
                # Engines and a store of their own: nothing is left of the other way.
                async with (
                    engines_of(python, hybrid, wanted, HYBRID_ENGINE | room) as house,
                    store(house.broker.address, "one"),
                ):
                    await _sessions(house, Random(repeat), marked, rendered, counted[marked])  # noqa: S311
        ours, theirs = counted[True], counted[False]
        how = "rendered anew" if rendered else "as they were said"
        note = f"of {ours.tokens}, {ours.new} of them new"
        case = f"{HYBRID}: {AGENTS} agents of {CALLS} tool calls, replies {how}: computed again"
        values = ours.again, "without marks", theirs.again, theirs.again / max(ours.again, 1)
        put(Row(SUITE, case, 0, *values, AGAIN_GOAL, note, AGENTS * CALLS, "tokens"))


async def _sessions(
    house: House, random: Random, marked: bool, rendered: bool, counted: Counted
) -> None:
    """Have all agents make their calls, a few at once."""

    def text(tokens: int) -> list[int]:
        return [random.randrange(8, VOCABULARY_SIZE) for _ in range(tokens)]

    async def session(calls: Sequence[Call]) -> None:
        said, old = list(system), SYSTEM_TOKENS
        for call in calls:
            said += call.question
            marks = {"marks": [SYSTEM_TOKENS, len(said)]} if marked else None
            async with at_once:
                answer = await house[call.place].ask(said, REPLY_TOKENS, marks)
            if answer.error:
                raise RuntimeError(answer.error)
            counted.tokens += len(said)
            counted.new += len(said) - old
            counted.again += old - answer.cached
            # The state after a reply lacks the reply's last token.
            old = len(said) + (0 if rendered else REPLY_TOKENS - 1)
            said += [*(call.rendered if rendered else answer.tokens[:-1]), END]
            await asyncio.sleep(TOOL_S)

    system, at_once = text(SYSTEM_TOKENS), asyncio.Semaphore(AT_ONCE)
    counted.new += SYSTEM_TOKENS  # for the first agent
    counted.again -= SYSTEM_TOKENS
    sessions = []
    for _ in range(AGENTS):
        sizes = [QUESTION_TOKENS, *(random.randint(*RESULT_TOKENS) for _ in range(CALLS - 1))]
        places = [random.choice(("one", "other")) for _ in sizes]
        calls = [
            Call(text(size), place, text(REPLY_TOKENS - 1))
            for size, place in zip(sizes, places, strict=True)
        ]
        sessions.append(session(calls))
    await asyncio.gather(*sessions)
