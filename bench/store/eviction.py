"""Which states a store keeps: by the cost to recompute per byte, beside LRU, on synthetic traces.

The simulation uses the store's own bookkeeping without memory. For each request it finds the
longest kept state that the prompt begins with, counts the rest as computed, and keeps two states:
where the prompt parts from everything seen before, and where the reply ends. The store has room for
a tenth of the bytes of all these states.

No trace is copied; three generators follow the shapes of published traces:

- ``chat``: Mooncake's `conversation` trace. Each turn begins with all that was said before; prompts
  have about 12,000 tokens at the mean with a long tail, replies about 350; about half of all prompt
  tokens were seen before, and LRU finds about 0.4 with room for a tenth (BurstGPT describes how
  such conversations come and end).
- ``agents``: Mooncake's `toolagent` trace. Many tasks begin with a long prompt of tools; prompts
  have about 9,000 tokens and replies 180; steps come within seconds, and a task may branch.
- ``prompts``: services in front of one application (Azure's traces of single requests). System
  prompts are shared by Zipf's law, followed by a short question without a second turn.

A text is a path in a tree: each segment has a name and a number of tokens, and texts that begin
with the same segments begin with the same tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from bench.report import Put, Row
from restow.agents.store.kept import (
    Kept,
    Recomputing,
    Worth,
    least_recently_used,
    recomputing_cost,
)
from restow.agents.store.room import PieceGroup, PieceKey, Room, Shape
from restow.broker.client import HashForm, Prefix

Segment = tuple[int, int]
"""A name and a number of tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the prompt to prefill, and the reply, which stays in the text."""

    at_s: float
    prompt: tuple[Segment, ...]
    reply: Segment

    @property
    def prompt_tokens(self) -> int:
        """Count the tokens of the prompt."""
        return sum(tokens for _, tokens in self.prompt)


Trace = Callable[[int, int], Iterator[Request]]
"""Makes requests from a seed and a number of sessions."""


def lognormal(random: Random, mean: float, sigma: float) -> int:
    """Draw a positive integer from a lognormal distribution."""
    return max(int(random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 1)


def chat(seed: int, sessions: int) -> Iterator[Request]:
    """Make conversations: half end with each turn; pauses are about two minutes, some are hours."""
    random, names = Random(seed), _names()  # noqa: S311
    system = [(next(names), tokens) for tokens in (400, 900, 1800, 2600)]
    waiting: list[tuple[float, int, tuple[Segment, ...]]] = []
    for number in range(sessions):
        start = random.choice(system)
        heapq.heappush(waiting, (number * 8.0 * random.expovariate(1.0), number, (start,)))
    while waiting:
        at_s, number, said = heapq.heappop(waiting)
        first = len(said) == 1
        question = (next(names), lognormal(random, 9500 if first else 2500, 1.3))
        reply = (next(names), lognormal(random, 350, 0.8))
        prompt = (*said, question)
        request = Request(at_s, prompt, reply)
        yield request
        if random.random() < 0.5 and request.prompt_tokens < 120_000:
            pause_s = random.lognormvariate(math.log(130), 1.3)
            heapq.heappush(waiting, (at_s + pause_s, number, (*prompt, reply)))


def agents(seed: int, sessions: int) -> Iterator[Request]:
    """Make tasks of many steps after a long prompt of tools; some steps branch."""
    random, names = Random(seed), _names()  # noqa: S311
    tools = [(next(names), lognormal(random, 4500, 0.5)) for _ in range(60)]
    odds = [1 / (1 + index) for index in range(len(tools))]
    waiting: list[tuple[float, int, tuple[Segment, ...]]] = []
    order = iter(range(10**9))
    for number in range(sessions):
        (tool,) = random.choices(tools, odds)
        task = (next(names), lognormal(random, 3000, 1.2))
        at_s = number * 12.0 * random.expovariate(1.0)
        heapq.heappush(waiting, (at_s, next(order), (tool, task)))
    while waiting:
        at_s, _, prompt = heapq.heappop(waiting)
        reply = (next(names), lognormal(random, 180, 0.7))
        yield Request(at_s, prompt, reply)
        if random.random() < 0.6:
            continue
        for _ in range(2 if random.random() < 0.06 else 1):
            result = (next(names), lognormal(random, 1500, 1.2))
            pause_s = random.lognormvariate(math.log(6), 1.0)
            later = at_s + pause_s
            heapq.heappush(waiting, (later, next(order), (*prompt, reply, result)))


def prompts(seed: int, sessions: int) -> Iterator[Request]:
    """Make single questions after a system prompt and its examples."""
    random, names = Random(seed), _names()  # noqa: S311
    systems = [
        ((next(names), lognormal(random, 2500, 0.8)), (next(names), lognormal(random, 1500, 0.8)))
        for _ in range(400)
    ]
    odds = [(1 + index) ** -0.9 for index in range(len(systems))]
    at_s = 0.0
    for _ in range(sessions * 4):
        at_s += random.expovariate(1.0)
        (system,) = random.choices(systems, odds)
        question = (next(names), lognormal(random, 500, 1.0))
        yield Request(at_s, (*system, question), (next(names), lognormal(random, 220, 0.8)))


def mixed(seed: int, sessions: int) -> Iterator[Request]:
    """Merge the three traces, as a store of several applications sees them."""
    made = [make(seed + index, sessions // 3) for index, make in enumerate((chat, agents, prompts))]
    apart = [[_of(request, index) for request in requests] for index, requests in enumerate(made)]
    yield from heapq.merge(*apart, key=lambda request: request.at_s)


TRACES: dict[str, Trace] = {"chat": chat, "agents": agents, "prompts": prompts, "mixed": mixed}


def _of(request: Request, application: int) -> Request:
    """Give a request's segments names that no other application uses."""
    first = application * 10**10

    def named(segment: Segment) -> Segment:
        return first + segment[0], segment[1]

    return Request(request.at_s, tuple(map(named, request.prompt)), named(request.reply))


def _names() -> Iterator[int]:
    return iter(range(10**12))


SUITE = "eviction"
BLOCK_TOKENS = 512
"""Tokens of a block in the published traces."""
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
    # Floating-point operations for a token, and for a token and each token before it.
    "hybrid": Recomputing(2 * 3.2e9, 4 * 6 * 32 * 128),
    "attention": Recomputing(2 * 8.0e9, 4 * 32 * 32 * 128),
}
SESSIONS = 450
GOAL = 1.3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of prompts that were found, all tokens, and the computing cost that was saved."""

    hit_tokens: int
    tokens: int
    saved: float

    @property
    def share(self) -> float:
        """Return the share of tokens that were found."""
        return self.hit_tokens / self.tokens


class Text:
    """A text: the hashes of its blocks, and the states in it."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.tokens = sum(tokens for _, tokens in segments)
        stops = range(BLOCK_TOKENS, self.tokens + 1, BLOCK_TOKENS)
        self.hashes = [self.content(stop) for stop in stops]

    def content(self, position: int) -> bytes:
        """Name the state at a position by all segments that begin before it."""
        hasher, start = hashlib.blake2b(digest_size=16), 0
        for name, tokens in self.segments:
            if start >= position:
                break
            hasher.update(b"%d:%d;" % (name, min(tokens, position - start)))
            start += tokens
        return hasher.digest()

    def prefix(self, position: int) -> Prefix:
        """Return the state at a position."""
        hashes = self.hashes[: position // BLOCK_TOKENS]
        end = self.content(position) if position % BLOCK_TOKENS else b""
        return Prefix(FORM, position, tuple(hashes), end)


def simulate(
    requests: list[Request], shape: Shape, cost: Recomputing, worth: Worth, size: int
) -> Outcome:
    """Run a trace against a store of ``size`` bytes."""
    kept = Kept(shape, Room(shape.page_bytes, size), worth, cost)
    seen: set[bytes] = set()
    states: set[bytes] = set()
    hit = total = 0
    saved = 0.0
    for request in requests:
        text = Text((*request.prompt, request.reply))
        limit = request.prompt_tokens - 1
        places = candidates(request, text, states)
        found_tokens = 0
        for position in sorted((p for p in places if p <= limit), reverse=True):
            pinned = kept.pin(text.prefix(position), request.at_s)
            if pinned is not None:
                kept.give_up(pinned)
                found_tokens = position
                break
        hit, total = hit + found_tokens, total + limit
        saved += cost.cost(0, found_tokens)
        junction = parting(text, seen, limit)
        for position in {junction, text.tokens}:
            if position > found_tokens:
                keep(kept, text.prefix(position), request.at_s)
        seen.update(text.hashes)
        states.update(text.content(position) for position in (junction, text.tokens) if position)
    return Outcome(hit, total, saved)


def keep(kept: Kept, prefix: Prefix, now_s: float) -> None:
    """Keep a state if there is room for it."""
    if not kept.holds(prefix):
        reserved = kept.reserve(prefix, now_s)
        if reserved is not None:
            kept.commit(reserved.pinned, now_s)


def parting(text: Text, seen: set[bytes], limit: int) -> int:
    """Return the end of the last block that a prompt shares with an earlier prompt."""
    blocks = 0
    for index, block_hash in enumerate(text.hashes[: limit // BLOCK_TOKENS]):
        if block_hash not in seen:
            break
        blocks = index + 1
    return blocks * BLOCK_TOKENS


def candidates(request: Request, text: Text, seen: set[bytes]) -> set[int]:
    """Return the positions at which a state was ever kept that this prompt begins with."""
    ends, position = set(), 0
    for _, tokens in request.prompt:
        position += tokens
        if text.content(position) in seen:
            ends.add(position)
    blocks = text.hashes[: position // BLOCK_TOKENS]
    return ends | {(index + 1) * BLOCK_TOKENS for index, at in enumerate(blocks) if at in seen}


def working_set_bytes(requests: list[Request], shape: Shape) -> int:
    """Return the bytes of all states that an endless store would keep."""
    seen: set[bytes] = set()
    pieces: set[PieceKey] = set()
    for request in requests:
        text = Text((*request.prompt, request.reply))
        for position in {parting(text, seen, request.prompt_tokens - 1), text.tokens} - {0}:
            listed = shape.pieces(text.prefix(position))
            pieces |= {key for keys in listed.values() for key in keys if key}
        seen.update(text.hashes)
    return sum(shape.page_bytes[key.group] for key in pieces)


def run(put: Put, repeats: int) -> None:
    """Compare with LRU on every trace and kind of model; the ratio is that of tokens found."""
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
            shares = [statistics.mean(column) for column in zip(*notes, strict=True)]
            words = (
                "found {:.0%} by LRU, {:.0%} by cost, {:.0%} endless; cost saved {:.2f} of LRU's"
            )
            ratio, case = statistics.mean(ratios), f"{trace}, {name}"
            put(
                Row(
                    *(SUITE, case, whole // 10, 0.0, "LRU", 0.0, ratio, GOAL),
                    note=words.format(*shares),
                    samples=len(ratios),
                    unit="",
                )
            )
