"""Conversations through `restow router`: with Find, beside the same without it, in turns.

Users begin with one of a few system prompts, and each turn's prompt is all that was said before it
and a new question. What P's computed and what was moved to D's is taken from the engines' own
counts. Of engines that run elsewhere name SESSIONS_PREFILL and SESSIONS_DECODE
(`p0=http://...`, with commas between) and RESTOW_BROKER; then the time to the first token is shown
too. Else a small set is started that computes nothing (`session_engines`).
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
from rows import Row, Yield, compared
from session_engines import COMPUTED, HELD, MOVED, SOURCES, served, session_engines

from restow.broker.client import AdminClient, AsyncAdminClient
from restow.broker.router.routing import RoutedEngine, Router

SUITE, LEAST_BUSY = "sessions", "least busy"
CASES = {"two turns": 2, "six turns": 6}
USERS, SYSTEM_PROMPTS, AT_ONCE = 24, 4, 4
SYSTEM_TOKENS = int(os.environ.get("SESSIONS_TOKENS", "1024"))
"""Of a system prompt; a question has a quarter of it on average, and a reply a sixteenth."""
VOCABULARY = int(os.environ.get("SESSIONS_VOCABULARY", "1000"))
ENGINES, ROOM = 3, 24
"""Of the small set: how many on each side, and for how many system prompts each has room."""
FIND_S = 1.0
"""So long that what is counted does not depend on how busy the machine is."""


@dataclass(slots=True)
class Outcome:
    """What became of a case: tokens of prompts by where they came from, and seconds."""

    prefill: Counter[str] = field(default_factory=Counter)
    decode: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    """To the first token of each turn but the first."""

    @property
    def found(self) -> float:
        """The share of all prompts that P's held."""
        return self.prefill[HELD] / max(self.prefill.total(), 1)


def run(put: Yield, repeats: int) -> None:
    """Each case with texts of its own, so that nothing is found of those before it."""
    for number, (case, turns) in enumerate(CASES.items()):
        finding, without = Outcome(), Outcome()
        for repeat in range(max(repeats // 3, 1)):
            seed = 2 * (repeat * len(CASES) + number)
            for other, (outcome, finds) in enumerate(((without, False), (finding, True))):
                asyncio.run(_play(outcome, seed + other, turns, finds))
        words = f"{USERS} users, {case}"
        note = f"held by P: {finding.found:.0%} of prompts, without Find {without.found:.0%}"
        for what, ours, theirs, more in (
            ("tokens computed at P", finding.prefill, without.prefill, note),
            ("tokens moved to D", finding.decode, without.decode, ""),
        ):
            source = COMPUTED if ours is finding.prefill else MOVED
            counts = f"{ours[source]} of {ours.total()}, without Find {theirs[source]}"
            ratio = theirs[source] / max(ours[source], 1)
            note = f"{counts}; {more}" if more else counts
            put(Row(SUITE, f"{words}, {what}", 0, 0.0, LEAST_BUSY, 0.0, ratio, note=note))
        if all(_named()):
            case = f"{words}, to the first token after turn 1"
            put(compared(SUITE, case, finding.first_s, LEAST_BUSY, without.first_s))


async def _play(outcome: Outcome, seed: int, turns: int, finds: bool) -> None:
    async with (
        _engines() as (broker, prefill, decode),
        ClientSession() as http,
        AsyncAdminClient(broker) as client,
    ):
        before = [await _sources(http, side) for side in (prefill, decode)]
        made = Router(_routed(prefill), _routed(decode), 600.0, client if finds else None, FIND_S)
        async with served(made.app()) as router:
            if finds:  # of the first calls one makes the connection
                await _ask(http, router, [1] * 2 * SYSTEM_TOKENS, 1)
                before = [await _sources(http, side) for side in (prefill, decode)]
            await _converse(http, router, Random(seed), turns, outcome)  # noqa: S311
        for counted, side, was in zip(
            (outcome.prefill, outcome.decode), (prefill, decode), before, strict=True
        ):
            counted.update(await _sources(http, side) - was)


async def _converse(
    http: ClientSession, router: str, random: Random, turns: int, outcome: Outcome
) -> None:
    """All users take a turn, some at once and in any order, and then the next."""

    def text(tokens: int) -> list[int]:
        return [random.randrange(3, VOCABULARY) for _ in range(tokens)]

    systems = [text(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    said = [list(systems[user % SYSTEM_PROMPTS]) for user in range(USERS)]
    some = asyncio.Semaphore(AT_ONCE)

    async def take_turn(user: int, question: Sequence[int], later: bool) -> None:
        async with some:
            said[user] += question
            first_s, reply = await _ask(http, router, said[user], max(SYSTEM_TOKENS // 16, 1))
            said[user] += reply
            if later:
                outcome.first_s.append(first_s)

    for turn in range(turns):
        users = random.sample(range(USERS), USERS)
        questions = [text(random.randrange(1, SYSTEM_TOKENS // 2)) for _ in users]
        turned = zip(users, questions, strict=True)
        await asyncio.gather(*(take_turn(user, words, turn > 0) for user, words in turned))


async def _ask(
    http: ClientSession, router: str, prompt: Sequence[int], tokens: int
) -> tuple[float, list[int]]:
    """Seconds to the first token, and the reply."""
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
            said = json.loads(data)
            if "error" in said:
                raise RuntimeError(said["error"]["message"])
            reply += [one for choice in said["choices"] for one in choice.get("token_ids") or ()]
    return first_s, reply


def _routed(engines: Sequence[str]) -> list[RoutedEngine]:
    """Engines that are named ``ID=URL``."""
    return [RoutedEngine(url, name) for name, _, url in (one.partition("=") for one in engines)]


async def _sources(http: ClientSession, engines: Sequence[str]) -> Counter[str]:
    """Tokens of prompts since the engines' start, by where they came from."""
    found: Counter[str] = Counter()
    for one in engines:
        async with http.get(one.partition("=")[2] + "/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                for sample in family.samples:
                    if sample.name == SOURCES:
                        found[sample.labels["source"]] += int(sample.value)
    return found


@asynccontextmanager
async def _engines() -> AsyncIterator[tuple[str, list[str], list[str]]]:
    """Those that are named, or a small set: the broker, all P, all D."""
    named = _named()
    if not all(named):
        async with session_engines(ENGINES, ROOM * SYSTEM_TOKENS) as made:
            yield made
        return
    with AdminClient() as client:
        yield client.address, named[0].split(","), named[1].split(",")


def _named() -> list[str]:
    return [os.environ.get(f"SESSIONS_{side}", "") for side in ("PREFILL", "DECODE")]
