"""Requests as a store sees them: which tokens they have in common, and when they come.

Three generators, none of which copies a trace. They follow the shapes of what is published:

- ``chat`` that of Mooncake's `conversation` trace: turns that each begin with all that was said
  before, prompts of some 12,000 tokens at the mean with a long tail, replies of some 350, of all
  prompts about half in common with earlier ones, and pauses such that LRU finds about 0.4 with room
  for a tenth (BurstGPT describes how such conversations come and end).
- ``agents`` that of Mooncake's `toolagent` trace: long prompts of tools that many tasks begin with,
  prompts of some 9,000 tokens and replies of 180, and steps that come within seconds; a task
  branches where several steps go on from one.
- ``prompts`` that of services in front of one application (Azure's traces of code and chat, of
  single requests): shared system prompts by Zipf's law, a short question, no second turn.

A text is a path in a tree: each segment has a name and a number of tokens, and texts that begin
with the same segments begin with the same tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

Segment = tuple[int, int]
"""A name, and its tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: what is prefilled, and how many tokens are answered. Both stay in the text."""

    at_s: float
    prompt: tuple[Segment, ...]
    reply: Segment

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prompt)


Trace = Callable[[int, int], Iterator[Request]]
"""Of a seed, and how many sessions."""


def lognormal(random: Random, mean: float, sigma: float) -> int:
    return max(int(random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 1)


def chat(seed: int, sessions: int) -> Iterator[Request]:
    """Conversations: half of them end with each turn; pauses of some two minutes, and of hours."""
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
    """Tasks of many steps after a long prompt of tools; some steps go two ways."""
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
    """Single questions after a system prompt, that after examples of its own."""
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
    """All of these at once, as a store of several applications has them."""
    made = [make(seed + index, sessions // 3) for index, make in enumerate((chat, agents, prompts))]
    apart = [[_of(one, index) for one in some] for index, some in enumerate(made)]
    yield from heapq.merge(*apart, key=lambda one: one.at_s)


TRACES: dict[str, Trace] = {"chat": chat, "agents": agents, "prompts": prompts, "mixed": mixed}


def _of(one: Request, application: int) -> Request:
    """The same request with names that no other application has."""
    first = application * 10**10

    def named(segment: Segment) -> Segment:
        return first + segment[0], segment[1]

    return Request(one.at_s, tuple(map(named, one.prompt)), named(one.reply))


def _names() -> Iterator[int]:
    return iter(range(10**12))
