"""A random schedule of handoffs and faults over a cluster."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from chaos_harness.cluster import Cluster
from chaos_harness.lives import STORE
from chaos_harness.questions import COMMAND_S
from restow.broker.families import ConvLayout
from restow.broker.state_commands import Outcome, Verb
from stamped.requests import Prompt

STRATEGIES = ("auto", "slices", "whole", "pack", "interleave")
LINKS: tuple[tuple[str, str], ...] = (("b", "p"), ("b", "d"), ("p", "d"))
PAGE_TOKENS = (8, 16)
LONGEST_TOKENS = 96
MAX_PENDING = 8
BY_CONTENT = 0.15
"""For each handoff, so many states are kept and asked for by their content."""
KEPT_S = 1.5
COMMANDED = 0.5
"""For how many of them the store gets a command."""
VERBS = (Verb.PREFETCH, Verb.PIN, Verb.RELEASE, Verb.EVICT)
ASKED_LATER = 0.5
"""How many of them are asked for again when engines have evicted them."""
HANDOFFS_PER_S = 12.0
FAULT_EVERY_S = (0.3, 3.0)
LONGEST_PAUSE_S = 8.0
LONGEST_CUT_S = 8.0
COMMAND_GRACE_S = 10.0
QUIET_S = 60.0
"""In which all must have ended after all has healed: lease, hold and quarantine, and pauses of
those that connect anew."""
EVICT_EVERY_S = 5.0
"""How often engines are told meanwhile to evict all that they keep."""


class Storm:
    """What happens to a cluster, decided by ``rng``."""

    def __init__(self, cluster: Cluster, rng: Random, can_cut: bool) -> None:
        self.faults: Counter[str] = Counter()
        self.handoffs = self.asked = 0
        """Under an id, and by content."""
        self._askers: list[tuple[str, str]] = []
        """Of those by content: which side asked under which name."""
        self.commands: Counter[str] = Counter()
        """How commands to the store have ended."""
        self._commands = 0
        self.later: list[tuple[str, str]] = []
        """Of those for what engines have evicted, so that the store alone may have it."""
        self._cluster, self._rng, self._links = cluster, rng, LINKS
        self._healing: set[asyncio.Task[None]] = set()
        self._faults: list[tuple[Callable[[], None], int]] = [
            *self.broker_faults(),
            (self._kill_engine, 4),
            (self._kill_worker, 2),
            (self._kill_store, 3),
            (self._stop_store, 1),
            (self._pause, 8),
            *([(self._drain, 3)] if cluster.fleet is None else []),
            *([(self._cut, 4)] if can_cut else []),
        ]

    async def blow(self, seconds: float) -> None:
        """Run handoffs and faults for some seconds."""
        end_s = time.monotonic() + seconds
        work = asyncio.create_task(self._work(end_s))
        while (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._rng.uniform(*FAULT_EVERY_S)))
            faults, weights = zip(*self._faults, strict=True)
            (fault,) = self._rng.choices(faults, weights)
            fault()
        await work

    async def calm(self, seconds: float) -> None:
        """Run handoffs without faults for some seconds."""
        await self._work(time.monotonic() + seconds)

    async def heal(self) -> str:
        """Wait until everything is as before the faults; return what is not, or an empty text."""
        while self._healing:
            await asyncio.wait(self._healing)
        await self._cluster.connected()
        if (store := self._cluster.store) is not None and store.alive and store.ended is not None:
            self._cluster.found.crashes.append(f"the store ended by itself, with {store.ended}")
            await self._restart_store(signal.SIGKILL)
        end_s = time.monotonic() + QUIET_S
        while True:
            for side, engine in self._cluster.engines.items():
                if engine.alive and engine.crashed:  # as when UCX has aborted a worker
                    self._cluster.end_engine(side)
                    self.start_engine(side)
            # What was being computed is kept later, and nobody else has it evicted.
            for side in self._cluster.engines:
                self._cluster.evict(None, side)
            left = await self._cluster.finished(EVICT_EVERY_S)
            if not left or time.monotonic() > end_s:
                return left

    async def _work(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(self._rng.expovariate(HANDOFFS_PER_S))
            engines = self._cluster.engines.values()
            if max((len(engine.pending) for engine in engines), default=0) < MAX_PENDING:
                self._hand_over(self._prompt())
                if self._rng.random() < BY_CONTENT:
                    self._keep_and_ask(self._prompt())

    def _keep_and_ask(self, prompt: Prompt) -> None:
        """Have an engine keep a state, and another ask for it; evict the state sooner or later."""
        holder, asking = self._rng.sample("PD", 2)
        rng = self._rng
        self.asked += 1
        kept = replace(prompt, name=f"kept{self.asked}")
        self._cluster.compute(kept, holder)
        name, keeps = f"{kept.name}?", rng.random() < 0.3
        ask = partial(self._cluster.ask, kept, name, asking, keeps)
        self._askers.append((asking, name))
        self._later(rng.uniform(0.0, KEPT_S), ask)
        self._later(rng.uniform(0.0, 2 * KEPT_S), partial(self._cluster.evict, kept, holder))
        self._later(2 * KEPT_S, partial(self._cluster.evict, kept, asking))
        if self._cluster.fleet is None and rng.random() < COMMANDED:
            self._after(self._command(kept, rng.choice(VERBS), rng.uniform(0.0, 4 * KEPT_S)))
        if rng.random() < ASKED_LATER:
            self.later.append((asking, f"{kept.name}?later"))
            ask = partial(self._cluster.ask, kept, self.later[-1][1], asking)
            self._later(rng.uniform(2.2, 7.0) * KEPT_S, ask)

    async def _command(self, prompt: Prompt, verb: Verb, after_s: float) -> None:
        """Give the store a command about a state, and check that it ends in time."""
        await asyncio.sleep(after_s)
        self._commands += 1
        name = f"{verb} {self._commands}"
        await self._cluster.command(name, verb, prompt)
        end_s = time.monotonic() + COMMAND_S + LONGEST_PAUSE_S + COMMAND_GRACE_S
        # A broker that was killed since knows nothing of it.
        while (outcome := await self._cluster.outcome(name)) == Outcome.ACCEPTED:
            if time.monotonic() > end_s:
                self._cluster.found.broken.append(f"command {name} does not end")
                return
            await asyncio.sleep(1.0)
        self.commands[f"{verb} {outcome or 'forgotten'}"] += 1

    def begun(self) -> Iterator[tuple[str, str]]:
        """Yield each side, and the handoff that it was told to hand over or ask for."""
        yield from ((side, f"h{number}") for number in range(self.handoffs) for side in "PD")
        yield from self._askers
        yield from self.later

    def _hand_over(self, prompt: Prompt) -> None:
        """Begin a handoff, at either side first."""
        self.handoffs += 1
        sides = [self._cluster.prefill, self._cluster.decode]
        self._rng.shuffle(sides)
        sides[0](prompt)
        # Waited for in the end: the first may be over before the second begins.
        self._later(self._rng.choice((0, 0.3)), lambda: sides[1](prompt))

    def _prompt(self) -> Prompt:
        rng = self._rng
        return Prompt(
            f"h{self.handoffs}",
            rng.randint(1, LONGEST_TOKENS),
            compute_s=rng.choice((0.0, 0.02, 0.2)),
            lease_ms=rng.choice((200, 1000, 4000)),
            hold_ms=rng.randint(1000, 6000),
            timeout_ms=rng.choice((300, 2000, 6000)),
            p_cancels_s=rng.choice((0.0,) * 19 + (0.05,)),
            d_cancels_s=rng.choice((0.0,) * 19 + (0.05,)),
        )

    # -- faults -----------------------------------------------------------------------------------

    def _later(self, delay_s: float, undo: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(delay_s)
            undo()

        self._after(wait())

    def _after(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    def broker_faults(self) -> list[tuple[Callable[[], None], int]]:
        """Return the faults that may befall the broker, and how often beside other faults."""
        return [(self._kill_broker, 2), (self._stop_broker, 1)]

    def start_broker(self) -> None:
        self._cluster.start_broker("--strategy", self._rng.choice(STRATEGIES))

    def start_engine(self, side: str) -> None:
        self._cluster.start_engine(
            side,
            self._rng.choice((1, 2)),
            self._rng.choice(list(ConvLayout)),
            self._rng.choice(PAGE_TOKENS),
        )

    def _short_s(self) -> float:
        return self._rng.choice((0.05, 2.0)) * self._rng.random()

    def _kill_broker(self, number: signal.Signals = signal.SIGKILL) -> None:
        broker = self._cluster.broker
        if broker is not None and broker.alive and not broker.stopped:
            self.faults["broker told to stop" if number == signal.SIGTERM else "broker killed"] += 1
            self._after(self._restart_broker(number))

    def _stop_broker(self) -> None:
        self._kill_broker(signal.SIGTERM)

    async def _restart_broker(self, number: signal.Signals) -> None:
        await self._cluster.end_broker(number)
        await asyncio.sleep(self._short_s())
        self.start_broker()

    def start_store(self) -> None:
        self._cluster.start_store()

    def _kill_store(self, number: signal.Signals = signal.SIGKILL) -> None:
        store = self._cluster.store
        if store is not None and store.alive and not store.stopped:
            self.faults["store told to stop" if number == signal.SIGTERM else "store killed"] += 1
            self._after(self._restart_store(number))

    def _stop_store(self) -> None:
        self._kill_store(signal.SIGTERM)

    async def _restart_store(self, number: signal.Signals) -> None:
        try:
            await self._cluster.end_store(number)
        except subprocess.TimeoutExpired:
            self._cluster.found.broken.append("the store does not end when it is told to")
            return
        await asyncio.sleep(self._short_s())
        self.start_store()

    def _kill_engine(self) -> None:
        side = self._rng.choice("PD")
        if self._cluster.engines[side].alive:
            self.faults["engine killed"] += 1
            self._end_engine(side)

    def _end_engine(self, side: str) -> None:
        if self._cluster.engines[side].alive:
            self._cluster.end_engine(side)
            self._later(self._short_s(), lambda: self.start_engine(side))

    def _kill_worker(self) -> None:
        """Kill a worker; its engine follows after a while."""
        side = self._rng.choice("PD")
        engine = self._cluster.engines[side]
        worker = self._rng.choice(engine.workers)
        if engine.alive and worker.alive:
            self.faults["worker killed"] += 1
            worker.kill()
            self._later(self._short_s(), lambda: self._follow(side, engine.life.name))

    def _follow(self, side: str, life: str) -> None:
        if self._cluster.engines[side].life.name == life:
            self._end_engine(side)

    def _drain(self) -> None:
        """Drain an engine or the store for a while: what moves leaves it."""
        self.faults["drained"] += 1
        self._after(self._drained(self._rng.choice(("P", "D", STORE))))

    async def _drained(self, engine: str) -> None:
        await self._cluster.drain(engine, True)
        await asyncio.sleep(self._short_s())
        while not await self._cluster.drain(engine, False):  # noqa: ASYNC110 - the broker is away
            await asyncio.sleep(1.0)

    def _pause(self) -> None:
        """Stop one process, or all processes of an engine."""
        members = [one for one in self._cluster.members if not one.stopped]
        if not members:
            return
        chosen = [self._rng.choice(members)]
        if self._rng.random() < 0.3:
            side = self._rng.choice("PD")
            chosen = [one for one in members if one.name.startswith(side)] or chosen
        for one in chosen:
            one.stop()
        self.faults[f"paused: {chosen[0].name if len(chosen) == 1 else chosen[0].name[0]}"] += 1

        def go_on() -> None:
            for one in chosen:
                one.go_on()

        self._later(self._rng.choice((0.5, LONGEST_PAUSE_S)) * self._rng.random(), go_on)

    def _cut(self) -> None:
        pair = self._rng.choice(self._links)
        self.faults[f"cut: {'-'.join(pair)}"] += 1
        self._cluster.cut(*pair)
        seconds = self._rng.choice((0.5, LONGEST_CUT_S)) * self._rng.random()
        self._later(seconds, lambda: self._cluster.heal(*pair))
