"""Which states a store keeps by its rule, beside LRU, on synthetic traces and on a trace of a file.

The simulation uses the store's own bookkeeping without memory. For each request it finds the
longest kept state that the prompt begins with, counts the rest as computed, and keeps two states:
where the prompt parts from everything seen before, and where the reply ends. The store has room for
a tenth of the bytes of all these states.

Three generators follow the shapes of published traces:

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

import gzip
import hashlib
import heapq
import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random

from bench.report import Put, Row
from restow.agents.store.kept import Kept, KeptState
from restow.agents.store.room import PieceGroup, PieceKey, Room, Shape
from restow.broker.client import HashForm, Prefix

Segment = tuple[int, int]
"""A name and a number of tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the prompt to prefill, and the reply, which stays in the text.

    ``reply`` is None if a trace does not name the reply's blocks. No later prompt is seen to
    continue it then, so the state at the end of the prompt's last whole block is kept instead.
    """

    at_s: float
    prompt: tuple[Segment, ...]
    reply: Segment | None

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


def read_trace(path: Path) -> list[Request]:
    """Read a trace in the format of Mooncake's public traces, also one that gzip compressed."""
    text = path.read_bytes()
    lines = (gzip.decompress(text) if path.suffix == ".gz" else text).splitlines()
    return [_from_blocks(**json.loads(line)) for line in lines]


def _from_blocks(
    timestamp: float, input_length: int, hash_ids: Sequence[int], **_: object
) -> Request:
    """Make a request of a line: milliseconds, tokens, and the ids of its blocks of 512 tokens."""
    whole, rest_tokens = divmod(input_length, BLOCK_TOKENS)
    prompt = [(block, BLOCK_TOKENS) for block in hash_ids[:whole]]
    prompt += [(block, rest_tokens) for block in hash_ids[whole:]]
    return Request(timestamp / 1000, tuple(prompt), None)


TRACES: dict[str, Trace] = {"chat": chat, "agents": agents, "prompts": prompts, "mixed": mixed}


def _of(request: Request, application: int) -> Request:
    """Give a request's segments names that no other application uses."""
    first = application * 10**10

    def named(segment: Segment) -> Segment:
        return first + segment[0], segment[1]

    reply = named(request.reply) if request.reply else None
    return Request(request.at_s, tuple(map(named, request.prompt)), reply)


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
SESSIONS = 450
GOAL = 0.97


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of prompts that were found, and all tokens."""

    hit_tokens: int
    tokens: int

    @property
    def share(self) -> float:
        """Return the share of tokens that were found."""
        return self.hit_tokens / self.tokens


class Text:
    """A text: the hashes of its blocks, and the states in it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._starts = [0, *accumulate(tokens for _, tokens in segments)]
        self._hashers = [hashlib.blake2b(digest_size=16)]
        for name, tokens in segments:
            hasher = self._hashers[-1].copy()
            hasher.update(b"%d:%d;" % (name, tokens))
            self._hashers.append(hasher)
        self.tokens = self._starts[-1]
        stops = range(BLOCK_TOKENS, self.tokens + 1, BLOCK_TOKENS)
        self.hashes = [self.content(stop) for stop in stops]

    def content(self, position: int) -> bytes:
        """Name the state at a position by all segments that begin before it."""
        index = bisect_left(self._starts, position) - 1
        hasher = self._hashers[index].copy()
        hasher.update(b"%d:%d;" % (self._segments[index][0], position - self._starts[index]))
        return hasher.digest()

    def prefix(self, position: int) -> Prefix:
        """Return the state at a position."""
        hashes = self.hashes[: position // BLOCK_TOKENS]
        end = self.content(position) if position % BLOCK_TOKENS else b""
        return Prefix(FORM, position, tuple(hashes), end)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, with the positions of the states in it.

    At ``known`` positions, longest first, earlier requests kept states that this prompt begins
    with; at ``ends`` this request keeps states. The last of a prompt's tokens is always computed.
    """

    text: Text
    limit_tokens: int
    junction: int
    known: tuple[int, ...]
    ends: tuple[int, ...]


def turns_of(requests: Iterable[Request]) -> Iterator[Turn]:
    """Yield a turn for each request of a trace."""
    seen: set[bytes] = set()
    states: set[bytes] = set()
    for request in requests:
        text = Text((*request.prompt, request.reply) if request.reply else request.prompt)
        limit = request.prompt_tokens - 1
        junction = parting(text, seen, limit)
        end = text.tokens if request.reply else text.tokens // BLOCK_TOKENS * BLOCK_TOKENS
        places = {*accumulate(tokens for _, tokens in request.prompt)}
        places |= {*range(BLOCK_TOKENS, junction + 1, BLOCK_TOKENS)}
        known = [one for one in places if one <= limit and text.content(one) in states]
        ends = [one for one in dict.fromkeys((junction, end)) if one]
        yield Turn(text, limit, junction, tuple(sorted(known, reverse=True)), tuple(ends))
        seen.update(text.hashes)
        states.update(map(text.content, ends))


def parting(text: Text, seen: set[bytes], limit: int) -> int:
    """Return the end of the last block that a prompt shares with an earlier prompt."""
    hashes = text.hashes[: limit // BLOCK_TOKENS]
    blocks = next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))
    return blocks * BLOCK_TOKENS


class LeastRecentlyUsed(Kept):
    """A store's memory from which the state goes that was used or kept least recently."""

    def worth(self, state: KeptState) -> float:
        """Value a state by the time of its last use, which the clock counts."""
        last_clock = self._pieces[state.pieces[-1]].clock
        return math.inf if math.isinf(super().worth(state)) else last_clock

    def _touch(self, keys: Collection[PieceKey], uses: int) -> None:
        self._clock += 1
        super()._touch(keys, uses)


def simulate(turns: Iterable[Turn], kept: Kept) -> Outcome:
    """Run a trace against an empty store."""
    hit = total = 0
    for turn in turns:
        found_tokens = longest_held(kept, turn)
        if found_tokens:
            pinned = kept.pin(turn.text.prefix(found_tokens))
            if pinned is not None:
                kept.give_up(pinned)
        hit, total = hit + found_tokens, total + turn.limit_tokens
        for position in turn.ends:
            if position > found_tokens:
                keep(kept, turn.text.prefix(position))
    return Outcome(hit, total)


def longest_held(kept: Kept, turn: Turn) -> int:
    """Return the position of the longest kept state that a prompt begins with.

    Attention alone is found at the end of any block, and a snapshot only where it was kept.
    """

    def lacks(position: int) -> bool:
        return not kept.holds(turn.text.prefix(position))

    longest = 0
    if kept.shape.by_block:
        stops = range(BLOCK_TOKENS, turn.junction + 1, BLOCK_TOKENS)
        longest = BLOCK_TOKENS * bisect_left(stops, True, key=lacks)
    return next((one for one in turn.known if one > longest and not lacks(one)), longest)


def keep(kept: Kept, prefix: Prefix) -> None:
    """Keep a state if there is room for it."""
    if not kept.holds(prefix):
        reserved = kept.reserve(prefix)
        if reserved is not None:
            kept.commit(reserved.pinned)


def working_set_bytes(turns: Iterable[Turn], shape: Shape) -> int:
    """Return the bytes of all states that an endless store would keep."""
    pieces: set[PieceKey] = set()
    for turn in turns:
        for position in turn.ends:
            listed = shape.pieces(turn.text.prefix(position))
            pieces |= {key for keys in listed.values() for key in keys if key}
    return sum(shape.page_bytes[key.group] for key in pieces)


def run(put: Put, repeats: int, trace: Path | None) -> None:
    """Compare with LRU on every trace and kind of model; the ratio is that of tokens found."""
    seeds = range(max(repeats // 3, 1))
    traces: dict[str, Callable[[], list[list[Turn]]]] = {
        name: partial(_seeded, make, seeds) for name, make in TRACES.items()
    }
    if trace is not None:
        traces[trace.name.split(".")[0]] = lambda: [list(turns_of(read_trace(trace)))]
    for trace_name, make in traces.items():
        samples = list(make())
        for model, shape in SHAPES.items():
            put(_compared(f"{trace_name}, {model}", samples, shape))


def _seeded(make: Trace, seeds: Iterable[int]) -> list[list[Turn]]:
    return [list(turns_of(make(seed, SESSIONS))) for seed in seeds]


def _compared(case: str, samples: Sequence[list[Turn]], shape: Shape) -> Row:
    """Make the row of a trace and a model, from several samples of the trace."""
    ratios, shares = [], []
    for turns in samples:
        whole = working_set_bytes(turns, shape)
        rooms = [Room(shape.page_bytes, size) for size in (whole // 10, whole // 10, 2 * whole)]
        made = zip((LeastRecentlyUsed, Kept, Kept), rooms, strict=True)
        lru, ours, endless = (simulate(turns, kind(shape, room)) for kind, room in made)
        ratios.append(ours.hit_tokens / lru.hit_tokens)
        shares.append((lru.share, ours.share, endless.share))
    found = [statistics.mean(column) for column in zip(*shares, strict=True)]
    return Row(
        *(SUITE, case, whole // 10, 0.0, "LRU", 0.0, statistics.mean(ratios), GOAL),
        note="found {:.1%} by LRU, {:.1%} by the store, {:.1%} with endless room".format(*found),
        samples=len(ratios),
        unit="",
    )
