"""Replies that move to another engine while they are decoded, and states that requests mark.

Here a client does what `restow router` does: its engine is drained and ends the reply behind the
next token, and the client asks the other engine with the prompt and the tokens so far. No HTTP is
in between. The engine ``one`` has TP 1 and windows in the layout SD, ``other`` TP 2, DS and longer
blocks. What a user would do without Restow takes turns with it: the other engine is asked with the
same tokens and a salt of which nobody holds anything, so that it computes all of them.

**Gap**: from the last token of the engine that is drained to the next one. **Equal**: a hundred
replies of the trained recall model move, a half of them in each direction, many at once, and are
compared with those of an engine that nobody interrupts. Replies with a seed do not move: they are
counted, too. **Drained**: 32 sessions leave an engine, whose cache has room for many more, or is
nearly full of them. Beside it the same engine is drained while its replies may not move, so that it
waits until they end; and the other engine computes all 32 anew.

`bench.vllm.forks` has the rows of forks and marks.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from bench.report import Put, Row, compared
from bench.vllm.forks import (
    ANEW,
    HYBRID,
    HYBRID_ENGINE,
    LONGEST_TOKENS,
    OTHER,
    SUITE,
    WARM_UP,
    agents,
    engines_of,
    forks,
    handoffs,
    hybrid,
)
from bench.vllm.second_turn import llama
from restow.broker.client import AsyncAdminClient
from restow.broker.router.bodies import MOVED
from vllm_harness.engine import Answer, Options
from vllm_harness.house import MODEL, SOON_S, TELL, House, both_sides, drawn, vllm_house

GAP_GOAL = 5.0
NOT_MOVED = "replies end by themselves"
WHOLE = "equal to a reply that nobody interrupted"
MOVABLE = {"movable": True}
MOVES, AT_ONCE, SEEDED = 100, 25, 20
EQUAL_TOKENS = 50
SESSIONS, SESSION_TOKENS, SESSION_REPLY_TOKENS = 32, 512, 256
ROOM_BLOCKS = {"room for many more": 2048, "nearly full": 512}


@dataclass(frozen=True)
class Case:
    """A model whose session of ``tokens`` moves, and the other engine's blocks."""

    name: str
    make: Callable[[], PreTrainedModel]
    engine: dict[str, Any]
    other_block_tokens: int
    tokens: int = 8192
    reply_tokens: int = 384


GAPS = (
    Case(HYBRID, hybrid, HYBRID_ENGINE, 64),
    Case(
        "llama, 76 M weights",
        partial(llama, max_position_embeddings=LONGEST_TOKENS),
        # A quarter of the blocks may be pinned for others, and the session needs 270 of them.
        {"block_size": 32, "num_gpu_blocks_override": 1280},
        64,
    ),
)


def run(put: Put, repeats: int) -> None:
    """Measure all rows; RESTOW_VLLM_PYTHON names the interpreter of vLLM's environment."""
    python = Path(os.environ["RESTOW_VLLM_PYTHON"])
    asyncio.run(equal(put, python))
    for case in GAPS:
        asyncio.run(gap(put, python, repeats, case))
    for measure in (forks, agents, drain):
        asyncio.run(measure(put, python, repeats))


@dataclass(frozen=True)
class Reply:
    """A reply of one engine, or of two if it moved, in the order of its parts."""

    ids: list[int]
    wanted_tokens: int
    parts: list[Answer]

    @property
    def failed(self) -> bool:
        """Return whether it ended with an error, or too early."""
        return any(part.error for part in self.parts) or len(self.tokens) != self.wanted_tokens

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of all parts."""
        return [token for part in self.parts for token in part.tokens]

    @property
    def moved(self) -> bool:
        """Return whether a second engine has gone on with it."""
        return len(self.parts) > 1

    @property
    def behind(self) -> int:
        """Return how many tokens the next engine had to compute before its first own one."""
        first, rest = self.parts
        return len(self.ids) + len(first.tokens) - rest.cached


@dataclass
class Mover:
    """A broker with two engines, and what its clients and its operator do."""

    house: House
    admin: AsyncAdminClient

    async def reply(
        self, ids: list[int], tokens: int, source: str, target: str, **more: Any
    ) -> Reply:
        """Have an engine reply, and another one go on with the reply if the first one leaves."""
        parts = [await self.house[source].ask(ids, tokens, **more)]
        if parts[0].stop_reason == MOVED:
            said = [*ids, *parts[0].tokens]
            left = tokens - len(parts[0].tokens)
            params = {**MOVABLE, "moved": True}
            parts.append(await self.house[target].ask(said, left, params))
        return Reply(ids, tokens, parts)

    async def leave(
        self, replies: Sequence[asyncio.Task[Reply]], source: str, after_s: float
    ) -> tuple[float, list[Reply]]:
        """Drain an engine while it replies, and have it resume after all replies have ended.

        Returns when it was drained, on the host's monotonic clock.
        """
        await asyncio.sleep(after_s)
        drained_s = time.monotonic()
        await self.admin.drain_engine(source)
        done = await asyncio.gather(*replies)
        async with asyncio.timeout(SOON_S):
            while await self.admin.drain_engine(source):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.02)
        await self.admin.drain_engine(source, False)
        return drained_s, done


# -- the gap of one reply -------------------------------------------------------------------------


async def gap(put: Put, python: Path, repeats: int, case: Case) -> None:
    """Move one long session at a time, and have the other engine compute it anew."""
    room = {"max_model_len": case.tokens + 512, "max_num_seqs": 4}
    longer = {"engine": {"block_size": case.other_block_tokens}}
    wanted: dict[str, dict[str, Any]] = {"one": {}, "other": OTHER | longer}
    async with (
        engines_of(python, case.make, wanted, case.engine | room) as house,
        AsyncAdminClient(house.broker.address) as admin,
    ):
        mover, gaps_s, anew_s = Mover(house, admin), list[float](), list[float]()
        replies, reads_s = list[Reply](), list[float]()
        for number in range(2):  # the first one warms up
            prefill_s = await _first_token(house, "one", drawn(case.tokens, 1000 + number))
        for number in range(WARM_UP + repeats):
            ids = drawn(case.tokens, number)
            asked = mover.reply(ids, case.reply_tokens, "one", "other", params=MOVABLE)
            told = [asyncio.create_task(asked)]
            _, (reply,) = await mover.leave(told, "one", 1.1 * prefill_s + 0.3)
            if reply.failed or not reply.moved:
                raise RuntimeError(f"the reply did not move: {reply.parts}")
            first, rest = reply.parts
            again_s = await _first_token(house, "other", [*ids, *first.tokens])
            if number >= WARM_UP:
                gaps_s.append(rest.first_s - first.done_s)
                anew_s.append(again_s)
                replies.append(reply)
                reads_s.append(handoffs(house)[-1].transfer_s or 0.0)
    read_bytes = handoffs(house)[-1].bytes_read
    computed = ", ".join(map(str, sorted({reply.behind for reply in replies})))
    step_s = statistics.median(
        (rest.done_s - rest.second_s) / (len(rest.tokens) - 2)
        for _, rest in (reply.parts for reply in replies)
    )
    note = f"computed: {computed} tokens; {read_bytes / 1e6:.0f} MB were read in "
    note += f"{1e3 * statistics.median(reads_s):.0f} ms; a step takes {1e3 * step_s:.0f} ms"
    words = f"{case.name}: {case.tokens} tokens move, to the next token"
    put(compared(SUITE, words, gaps_s, ANEW, anew_s, goal=GAP_GOAL, note=note))


async def _first_token(house: House, name: str, ids: list[int]) -> float:
    """Return the seconds to the first token of an engine that computes a prompt anew."""
    began_s = time.monotonic()
    answer = await house.alone(name, ids, 1)
    return answer.first_s - began_s


# -- equal tokens ---------------------------------------------------------------------------------


async def equal(put: Put, python: Path) -> None:
    """Compare replies that move with those that nobody interrupts, and replies with a seed."""
    one = Options(MODEL, prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=replace(one, **OTHER))
    greedy, seeded = Equality(), Equality()
    with TemporaryDirectory() as logs:
        async with (
            vllm_house(python, Path(logs), wanted) as house,
            AsyncAdminClient(house.broker.address) as admin,
        ):
            mover = Mover(house, admin)
            for number in range(2 * MOVES // AT_ONCE):
                names = ("other", "one") if number % 2 else ("one", "other")
                first = AT_ONCE * number
                await _equal(mover, *names, range(first, first + AT_ONCE), greedy, {})
                if len(greedy.moved) >= MOVES:
                    break
            await _equal(mover, "one", "other", range(SEEDED), seeded, {"temperature": 1.0})
    for case, equals, others in (
        ("replies move", greedy.moved, greedy.stayed),
        ("replies with a seed stay", seeded.stayed, seeded.moved),
    ):
        note = f"{len(others)} others, {sum(others)} of them equal" if others else ""
        values = len(equals), WHOLE, sum(equals), sum(equals) / len(equals), 1.0, note
        put(Row(SUITE, f"recall: {case}", 0, *values, len(equals), "replies"))


@dataclass
class Equality:
    """Which replies equal those that nobody interrupted, of those that moved and those that not."""

    moved: list[bool] = field(default_factory=list)
    stayed: list[bool] = field(default_factory=list)


async def _equal(
    mover: Mover,
    source: str,
    target: str,
    seeds: Iterable[int],
    equality: Equality,
    sampling: dict[str, Any],
) -> None:
    """Drain an engine in the middle of some replies, and compare them with whole ones."""
    asked = [
        (drawn(20 + seed % 40, seed), sampling and {**sampling, "seed": seed}) for seed in seeds
    ]
    began_s = time.monotonic()
    whole = await asyncio.gather(
        *(mover.house.alone(source, ids, EQUAL_TOKENS, **own) for ids, own in asked)
    )
    half_s = (time.monotonic() - began_s) / 2
    replies = [
        asyncio.create_task(mover.reply(ids, EQUAL_TOKENS, source, target, params=MOVABLE, **own))
        for ids, own in asked
    ]
    _, done = await mover.leave(replies, source, half_s)
    for reply, right in zip(done, whole, strict=True):
        of_its_kind = equality.moved if reply.moved else equality.stayed
        of_its_kind.append(not reply.failed and reply.tokens == list(right.tokens))


# -- many sessions leave --------------------------------------------------------------------------


@dataclass
class Left:
    """Seconds from the drain until an engine was empty, and what became of its sessions.

    ``anew_s`` are the seconds in which another engine computes all of them anew.
    """

    empty_s: list[float] = field(default_factory=list)
    stayed_s: list[float] = field(default_factory=list)
    anew_s: list[float] = field(default_factory=list)
    moved: int = 0
    in_part: int = 0
    """Sessions of which another state than that at their last token was found."""
    whole: int = 0
    """Sessions of which no state was found."""
    failed: int = 0


async def drain(put: Put, python: Path, repeats: int) -> None:
    """Drain an engine of many sessions, with much room in its cache and with little."""
    for room, blocks in ROOM_BLOCKS.items():
        limits = {"max_model_len": 1024, "max_num_seqs": SESSIONS}
        engine = HYBRID_ENGINE | limits | {"num_gpu_blocks_override": blocks}
        left = Left()
        async with (
            engines_of(python, hybrid, {"one": {}, "other": OTHER}, engine) as house,
            AsyncAdminClient(house.broker.address) as admin,
        ):
            for number in range(WARM_UP + max(repeats // 2, 1)):
                kept = left if number >= WARM_UP else Left()
                await _sessions_leave(Mover(house, admin), number, kept)
        case = f"{HYBRID}: {SESSIONS} sessions leave an engine, its cache {room}"
        note = f"of {left.moved}: {left.in_part} recomputed in part, {left.whole} whole, "
        note += f"{left.failed} failed"
        values = f"{case}: until it is empty", left.empty_s
        put(compared(SUITE, *values, NOT_MOVED, left.stayed_s, note=note))
        values = f"{case}: until all have their next token", left.empty_s
        put(compared(SUITE, *values, ANEW, left.anew_s, note=note))
        unharmed = left.moved - left.in_part - left.whole - left.failed
        counts = left.moved, "neither recomputed nor failed", unharmed, unharmed / left.moved
        put(Row(SUITE, case, 0, *counts, 1.0, note, left.moved, "sessions"))


async def _sessions_leave(mover: Mover, number: int, left: Left) -> None:
    """Drain an engine whose sessions move, then one whose sessions may not; compute them anew."""
    house = mover.house

    def prompts(kind: int) -> list[list[int]]:
        first = 1000 * (3 * number + kind)
        return [drawn(SESSION_TOKENS, first + session) for session in range(SESSIONS)]

    async def all_anew(name: str, asked: list[list[int]]) -> float:
        return max(await asyncio.gather(*(_first_token(house, name, ids) for ids in asked)))

    prefill_s = await all_anew("one", prompts(0))
    outcomes = []
    for kind, params in ((1, MOVABLE), (2, None)):
        asked = [
            asyncio.create_task(
                mover.reply(ids, SESSION_REPLY_TOKENS, "one", "other", params=params)
            )
            for ids in prompts(kind)
        ]
        outcomes.append(await mover.leave(asked, "one", prefill_s + 1.0))
    (drained_s, replies), (stay_drained_s, stayed) = outcomes
    moved = [reply for reply in replies if reply.moved]
    left.moved += len(moved)
    left.failed += sum(reply.failed for reply in moved)
    again = [reply.parts[1].cached for reply in moved if not reply.failed and reply.behind > 1]
    left.whole += again.count(0)
    left.in_part += len(again) - again.count(0)
    left.empty_s.append(max(reply.parts[1].first_s for reply in moved) - drained_s)
    left.stayed_s.append(max(reply.parts[0].done_s for reply in stayed) - stay_drained_s)
    left.anew_s.append(
        await all_anew("other", [[*reply.ids, *reply.parts[0].tokens] for reply in moved])
    )
