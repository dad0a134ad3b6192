"""The tokens that conversations through `restow router` save when it asks who holds a prompt.

Users begin with one of a few system prompts; the prompt of each turn is everything said before and
a new question. The engines' own counters say what P computed and what was moved to D. Without
further settings the engines only count (`counting_engines`). Name SESSIONS_PREFILL and
SESSIONS_DECODE (`p0=http://...`, separated by commas) and RESTOW_BROKER to measure engines that run
elsewhere; then the time to the first token is measured too.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from bench.report import Put, Row, compared
from bench.store.counting_engines import (
    COMPUTED,
    HELD,
    MOVED,
    SOURCES,
    counting_engines,
    served,
)
from restow.broker.client import AdminClient, AsyncAdminClient
from restow.broker.router.routing import RoutedEngine, Router

SUITE, LEAST_BUSY = "router-sessions", "least busy"
CASES = {"two turns": 2, "six turns": 6}
VOCABULARY = int(os.environ.get("SESSIONS_VOCABULARY", "1000"))
ENGINES, ROOM = 3, 24
"""Counting engines on each side, and the system prompts for which each has room."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is said: a question has a quarter of ``system_tokens`` on average, a reply 1/16.

    The router waits ``find_s`` for the broker: long enough that the counts do not depend on how
    busy the machine is. ``at_once`` turns are under way at the same time.
    """

    users: int = 24
    system_prompts: int = 4
    system_tokens: int = 1024
    at_once: int = 4
    find_s: float = 1.0


@dataclass(slots=True)
class Outcome:
    """Tokens of prompts by their source, and seconds to the first token after turn 1."""

    prefill: Counter[str] = field(default_factory=Counter)
    decode: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)

    @property
    def found(self) -> float:
        """Return the share of prompt tokens that P held."""
        return self.prefill[HELD] / max(self.prefill.total(), 1)


def run(put: Put, repeats: int) -> None:
    """Measure each case with texts of its own, so that no case finds the texts of another case."""
    sizes = Sizes(system_tokens=int(os.environ.get("SESSIONS_TOKENS", Sizes().system_tokens)))
    for number, (case, turns) in enumerate(CASES.items()):
        finding, without = Outcome(), Outcome()
        for repeat in range(max(repeats // 3, 1)):
            seed = 2 * (repeat * len(CASES) + number)
            for other, (outcome, finds) in enumerate(((without, False), (finding, True))):
                asyncio.run(play(outcome, sizes, seed + other, turns, finds))
        words = f"{sizes.users} users, {case}"
        note = f"held by P: {finding.found:.0%} of prompts, without Find {without.found:.0%}"
        for what, ours, theirs, more in (
            ("tokens computed at P", finding.prefill, without.prefill, note),
            ("tokens moved to D", finding.decode, without.decode, ""),
        ):
            source = COMPUTED if ours is finding.prefill else MOVED
            values = (max(ours[source], 1), LEAST_BUSY, theirs[source])
            ratio = theirs[source] / values[0]
            note = f"of {ours.total()}; {more}" if more else f"of {ours.total()}"
            case_words = f"{words}, {what}"
            put(Row(SUITE, case_words, 0, *values, ratio, note=note, unit="tokens"))
        if all(_named()):
            case = f"{words}, to the first token after turn 1"
            put(compared(SUITE, case, finding.first_s, LEAST_BUSY, without.first_s))


async def play(outcome: Outcome, sizes: Sizes, seed: int, turns: int, finds: bool) -> None:
    """Play all conversations through a router, with or without Find, and count in ``outcome``."""
    async with (
        _engines(sizes) as (broker, prefill, decode),
        ClientSession() as http,
        AsyncAdminClient(broker) as client,
    ):
        before = [await _sources(http, side) for side in (prefill, decode)]
        found_by = client if finds else None
        made = Router(_routed(prefill), _routed(decode), 600.0, found_by, sizes.find_s)
        async with served(made.app()) as router:
            if finds:  # the first call makes the connection
                await _ask(http, router, [1] * 2 * sizes.system_tokens, 1)
                before = [await _sources(http, side) for side in (prefill, decode)]
            await _converse(http, router, sizes, Random(seed), turns, outcome)  # noqa: S311
        for counted, side, was in zip(
            (outcome.prefill, outcome.decode), (prefill, decode), before, strict=True
        ):
            counted.update(await _sources(http, side) - was)


async def _converse(
    http: ClientSession, router: str, sizes: Sizes, random: Random, turns: int, outcome: Outcome
) -> None:
    """Have all users take a turn, several at once in random order, and then the next turn."""

    def text(tokens: int) -> list[int]:
        return [random.randrange(3, VOCABULARY) for _ in range(tokens)]

    systems = [text(sizes.system_tokens) for _ in range(sizes.system_prompts)]
    said = [list(systems[user % sizes.system_prompts]) for user in range(sizes.users)]
    at_once = asyncio.Semaphore(sizes.at_once)

    async def take_turn(user: int, question: Sequence[int], later: bool) -> None:
        async with at_once:
            said[user] += question
            first_s, reply = await _ask(http, router, said[user], max(sizes.system_tokens // 16, 1))
            said[user] += reply
            if later:
                outcome.first_s.append(first_s)

    for turn in range(turns):
        users = random.sample(range(sizes.users), sizes.users)
        questions = [text(random.randrange(1, sizes.system_tokens // 2)) for _ in users]
        turned = zip(users, questions, strict=True)
        await asyncio.gather(*(take_turn(user, words, turn > 0) for user, words in turned))


async def _ask(
    http: ClientSession, router: str, prompt: Sequence[int], tokens: int
) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the reply."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "stream": True}
    more = {"return_token_ids": True, "ignore_eos": True, "temperature": 0.0}
    began_s, first_s, reply = time.perf_counter(), 0.0, list[int]()
    async with http.post(router + "/v1/completions", json={**body, **more}) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            first_s = first_s or time.perf_counter() - began_s
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            reply += [
                token_id
                for choice in event["choices"]
                for token_id in choice.get("token_ids") or ()
            ]
    return first_s, reply


def _routed(engines: Sequence[str]) -> list[RoutedEngine]:
    """Return engines that are named ``ID=URL``."""
    return [
        RoutedEngine(url, name) for name, _, url in (engine.partition("=") for engine in engines)
    ]


async def _sources(http: ClientSession, engines: Sequence[str]) -> Counter[str]:
    """Return the tokens of prompts since the engines' start, by their source."""
    by_source: Counter[str] = Counter()
    for engine in engines:
        async with http.get(engine.partition("=")[2] + "/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                for sample in family.samples:
                    if sample.name == SOURCES:
                        by_source[sample.labels["source"]] += int(sample.value)
    return by_source


@asynccontextmanager
async def _engines(sizes: Sizes) -> AsyncIterator[tuple[str, list[str], list[str]]]:
    """Yield the broker, all P and all D: those that are named, or counting engines."""
    named = _named()
    if not all(named):
        async with counting_engines(ENGINES, ROOM * sizes.system_tokens) as made:
            yield made
        return
    with AdminClient() as client:
        yield client.address, named[0].split(","), named[1].split(",")


def _named() -> list[str]:
    return [os.environ.get(f"SESSIONS_{side}", "") for side in ("PREFILL", "DECODE")]
