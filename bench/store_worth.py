"""``./run bench --suite store``: which states are kept, by what they cost a byte and by LRU.

The bookkeeping is the store's own, with the memory left out. Of each request the longest kept state
that its prompt begins with is found, the rest is computed, and two states are kept: where the
prompt parts from what was seen before (its junction), and where the reply ends. A tenth of the
bytes of all these states is there for them.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rows import Row
from store_traces import TRACES, Request, Segment

from restow.agents.store.books.kept import (
    Kept,
    Recomputing,
    Worth,
    least_recently_used,
    recomputing_cost,
)
from restow.agents.store.books.room import PieceGroup, PieceKey, Room, Shape
from restow.broker.client import HashForm, Prefix

BLOCK_TOKENS = 512
"""As of the published traces."""
FORM = HashForm("a trace's", BLOCK_TOKENS, 16)
MIB = 1 << 20
SHAPES = {
    # Nemotron-3-Nano: 6 attention layers of 2 heads, and 23 Mamba-2 layers.
    "hybrid": Shape(
        (PieceGroup("tokens", BLOCK_TOKENS), PieceGroup("snapshots", 0)),
        {"tokens": BLOCK_TOKENS * 6 * 1024, "snapshots": 48 * MIB},
    ),
    # Llama-3.1-8B: 32 attention layers of 8 heads.
    "attention": Shape((PieceGroup("tokens", BLOCK_TOKENS),), {"tokens": BLOCK_TOKENS * 32 * 4096}),
}
COSTS = {
    # Floating-point operations of a token, and of a token and one before it.
    "hybrid": Recomputing(2 * 3.2e9, 4 * 6 * 32 * 128),
    "attention": Recomputing(2 * 8.0e9, 4 * 32 * 32 * 128),
}
SESSIONS = 450
GOAL = 1.3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What of all prompts was found, in tokens, and of the cost to compute them."""

    hit_tokens: int
    tokens: int
    saved: float

    @property
    def share(self) -> float:
        return self.hit_tokens / self.tokens


class Text:
    """The hashes of a text's blocks, and of the states in it."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.tokens = sum(tokens for _, tokens in segments)
        stops = range(BLOCK_TOKENS, self.tokens + 1, BLOCK_TOKENS)
        self.hashes = [self.content(stop) for stop in stops]

    def content(self, position: int) -> bytes:
        """Name the state at a position by all segments that begin before it."""
        made, start = hashlib.blake2b(digest_size=16), 0
        for name, tokens in self.segments:
            if start >= position:
                break
            made.update(b"%d:%d;" % (name, min(tokens, position - start)))
            start += tokens
        return made.digest()

    def prefix(self, position: int) -> Prefix:
        hashes = self.hashes[: position // BLOCK_TOKENS]
        end = self.content(position) if position % BLOCK_TOKENS else b""
        return Prefix(FORM, position, tuple(hashes), end)


def simulate(
    requests: list[Request], shape: Shape, cost: Recomputing, worth: Worth, size: int
) -> Outcome:
    """Run a trace against a store of so many bytes."""
    kept = Kept(shape, Room(shape.page_bytes, size), worth, cost)
    seen: set[bytes] = set()
    states: set[bytes] = set()
    hit = total = 0
    saved = 0.0
    for one in requests:
        text = Text((*one.prompt, one.reply))
        limit = one.prompt_tokens - 1
        places = candidates(one, text, states)
        found = 0
        for position in sorted((p for p in places if p <= limit), reverse=True):
            pinned = kept.pin(text.prefix(position), one.at_s)
            if pinned is not None:
                kept.give_up(pinned)
                found = position
                break
        hit, total = hit + found, total + limit
        saved += cost.cost(0, found)
        junction = parting(text, seen, limit)
        for position in {junction, text.tokens}:
            if position > found:
                keep(kept, text.prefix(position), one.at_s)
        seen.update(text.hashes)
        states.update(text.content(position) for position in (junction, text.tokens) if position)
    return Outcome(hit, total, saved)


def keep(kept: Kept, prefix: Prefix, now_s: float) -> None:
    if not kept.holds(prefix):
        reserved = kept.reserve(prefix, now_s)
        if reserved is not None:
            kept.commit(reserved.pinned, now_s)


def parting(text: Text, seen: set[bytes], limit: int) -> int:
    """Where a prompt parts from all that were before it, at the end of a block."""
    blocks = 0
    for index, one in enumerate(text.hashes[: limit // BLOCK_TOKENS]):
        if one not in seen:
            break
        blocks = index + 1
    return blocks * BLOCK_TOKENS


def candidates(one: Request, text: Text, seen: set[bytes]) -> set[int]:
    """Positions at which there ever was a state that this prompt begins with."""
    ends, position = set(), 0
    for _, tokens in one.prompt:
        position += tokens
        if text.content(position) in seen:
            ends.add(position)
    blocks = text.hashes[: position // BLOCK_TOKENS]
    return ends | {(index + 1) * BLOCK_TOKENS for index, at in enumerate(blocks) if at in seen}


def working_set_bytes(requests: list[Request], shape: Shape) -> int:
    """Bytes of all states that a store without an end would have."""
    seen: set[bytes] = set()
    pieces: set[PieceKey] = set()
    for one in requests:
        text = Text((*one.prompt, one.reply))
        for position in {parting(text, seen, one.prompt_tokens - 1), text.tokens} - {0}:
            listed = shape.pieces(text.prefix(position))
            pieces |= {key for some in listed.values() for key in some if key}
        seen.update(text.hashes)
    return sum(shape.page_bytes[key.group] for key in pieces)


def run(put: Callable[[Row], None], repeats: int) -> None:
    """Compare with LRU on every trace and sort of model; a row's ratio is that of tokens found."""
    for trace, make in TRACES.items():
        for name, shape in SHAPES.items():
            ratios, notes = [], []
            for seed in range(max(repeats // 3, 1)):
                requests = list(make(seed, SESSIONS))
                whole = working_set_bytes(requests, shape)
                given = requests, shape, COSTS[name]
                lru = simulate(*given, least_recently_used, whole // 10)
                ours = simulate(*given, recomputing_cost, whole // 10)
                endless = simulate(*given, least_recently_used, 2 * whole)
                ratios.append(ours.hit_tokens / lru.hit_tokens)
                notes.append((lru.share, ours.share, endless.share, ours.saved / lru.saved))
            shares = [statistics.mean(one) for one in zip(*notes, strict=True)]
            words = "found {:.0%} by LRU, {:.0%}, of all room {:.0%}; cost saved {:.2f} of LRU's"
            ratio, case = statistics.mean(ratios), f"{trace}, {name}"
            put(
                Row(
                    *("store", case, whole // 10, 0.0, "LRU", 0.0, ratio, GOAL),
                    note=words.format(*shares),
                    samples=len(ratios),
                )
            )
