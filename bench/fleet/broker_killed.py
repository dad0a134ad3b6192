"""How soon everything goes on after the only broker was killed with -9 and started again.

``broker-killed``: a P and a D with real sessions, agents and NIXL hand over small states at a
steady rate all the while; times count from the moment when the broker listens again.
``reconnect``: 10,000 agents of 1,250 engines, each with a connection of its own, only stay
connected; the time counts from the kill until the broker knows all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, RunningPairs, connected, running_pairs
from bench.model_sizes import tiny_hybrid
from bench.processes import module, open_log, peak_bytes_of, running_broker
from bench.report import Put, compared
from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError

RATE_PER_S = 200
TOKENS = 256
PLACES = 4096
"""Handoffs under way at once: more than are requested during the longest pause."""
RANKS = 2
BEFORE_S, AFTER_S = 3.0, 6.0
GOAL_S = 3.0
PAIR = "load"
MAX_KILLS, MAX_RECONNECTS = 5, 3
# In production the broker has its own processors, so the crowd must not take them from it.
CROWD = ("nice", "-n", "15", *module("bench.fleet.connected_crowd"))
CROWD_ENGINES, CROWD_RANKS = 1250, 8
CROWD_PROCESSES = 5
CONNECT_S = 300.0
BACK_GOAL_S = 30.0


@dataclass
class Handoff:
    """When a handoff was requested, and how it ended."""

    begun_s: float
    ended_s: float = 0.0
    end: str = ""


@dataclass(frozen=True)
class Killed:
    """The times around one kill, on one clock, and all handoffs.

    ``left`` counts handoffs that the broker still knows as live after all of them have ended.
    """

    killed_s: float
    back_s: float
    whole_s: float
    handoffs: list[Handoff]
    left: int

    def where(self, wanted: Callable[[Handoff], bool]) -> list[Handoff]:
        """Return the handoffs that a condition selects."""
        return [handoff for handoff in self.handoffs if wanted(handoff)]

    @property
    def at_work(self) -> int:
        """Count the handoffs that were under way when the broker was killed."""
        return len(self.where(lambda handoff: handoff.begun_s < self.killed_s < handoff.ended_s))

    @property
    def caught_up_s(self) -> float:
        """Return the seconds until all handoffs requested before the broker's return had ended."""
        return max(h.ended_s for h in self.where(lambda h: h.begun_s < self.back_s)) - self.back_s

    @property
    def slowest_later_s(self) -> float:
        """Return the seconds of the slowest handoff requested after the broker's return."""
        later = self.where(lambda h: h.begun_s >= self.back_s)
        return max(h.ended_s - h.begun_s for h in later)


def run(put: Put, repeats: int) -> None:
    """Kill the broker once per repeat."""
    kills = [uvloop.run(_killed(number)) for number in range(min(repeats, MAX_KILLS))]
    away = statistics.median(killed.back_s - killed.killed_s for killed in kills)
    asked = sum(len(killed.handoffs) for killed in kills)
    at_work = [killed.at_work for killed in kills]
    for case, seconds, note in (
        (
            "directory whole after the broker's return",
            [killed.whole_s - killed.back_s for killed in kills],
            f"2 engines, {2 * RANKS} agents; the broker was away for {away:.1f} s",
        ),
        (
            "all requested before its return are handed over",
            [killed.caught_up_s for killed in kills],
            f"{asked} handoffs at {RATE_PER_S} a second, not DONE: "
            f"{not_done(h for killed in kills for h in killed.handoffs)}; live when all had ended: "
            f"{sum(killed.left for killed in kills)}; {min(at_work)} to {max(at_work)} under way "
            "when it was killed",
        ),
        (
            "the slowest requested after its return",
            [killed.slowest_later_s for killed in kills],
            "from the request to its end",
        ),
    ):
        budget = f"budget of {GOAL_S:g} s"
        put(compared("broker-killed", case, seconds, budget, [GOAL_S], goal=1.0, note=note))


def not_done(handoffs: Iterator[Handoff]) -> str:
    """Count the ends other than DONE, in words."""
    ends = Counter(handoff.end for handoff in handoffs if handoff.ended_s and handoff.end != "DONE")
    return ", ".join(f"{count} {end}" for end, count in ends.items()) or "none"


async def _killed(number: int) -> Killed:
    layout = tiny_hybrid(RANKS)
    with running_broker() as broker:
        pairs = {PAIR: EnginePair((layout, layout), broker.address, 1)}
        async with running_pairs(f"killed{number}", pairs, TOKENS, prompts=PLACES) as engines:
            await connected(broker.address, 2, 2 * RANKS)
            handoffs: list[Handoff] = []
            tasks: set[asyncio.Task[None]] = set()
            load = asyncio.create_task(steady_load(engines, handoffs, tasks))
            await asyncio.sleep(BEFORE_S)
            killed_s = time.monotonic()
            broker.kill()
            await asyncio.to_thread(broker.restart)
            back_s = time.monotonic()
            await connected(broker.address, 2, 2 * RANKS)
            whole_s = time.monotonic()
            await asyncio.sleep(max(0.0, back_s + AFTER_S - time.monotonic()))
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
            with AdminClient(broker.address, timeout_s=5.0) as admin:
                left = (await asyncio.to_thread(admin.status)).handoffs_live
            return Killed(killed_s, back_s, whole_s, handoffs, left)


async def steady_load(
    engines: RunningPairs, handoffs: list[Handoff], tasks: set[asyncio.Task[None]]
) -> None:
    """Hand over at a steady rate, whatever becomes of earlier handoffs."""
    rng, places = np.random.default_rng(0), deque(range(PLACES))
    began_s = time.monotonic()
    while True:
        handoff = Handoff(time.monotonic())
        handoffs.append(handoff)
        task = asyncio.create_task(_hand_over(engines, len(handoffs), handoff, places, rng))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(began_s + len(handoffs) / RATE_PER_S - time.monotonic())


async def _hand_over(
    engines: RunningPairs,
    number: int,
    handoff: Handoff,
    places: deque[int],
    rng: np.random.Generator,
) -> None:
    place = places.popleft()
    try:
        ended = await engines.attempt_in_place(PAIR, number, place, rng)
        handoff.end = ended.reason or ended.state
    except RestowError as error:
        handoff.end = error.reason
    places.append(place)
    handoff.ended_s = time.monotonic()


def run_reconnect(put: Put, repeats: int) -> None:
    """Kill and restart the broker of the crowd once per repeat."""
    back: list[float] = []
    peak_bytes = 0
    with running_broker() as broker, crowd(broker.address):
        broker_that_knows([broker.address], CROWD_ENGINES, CROWD_ENGINES * CROWD_RANKS)
        for _ in range(min(repeats, MAX_RECONNECTS)):
            killed_s = time.monotonic()
            broker.kill()
            broker.restart()
            broker_that_knows([broker.address], CROWD_ENGINES, CROWD_ENGINES * CROWD_RANKS)
            back.append(time.monotonic() - killed_s)
            peak_bytes = max(peak_bytes, peak_bytes_of(broker.pid))
    agents = CROWD_ENGINES * CROWD_RANKS
    note = f"{agents} agents, {CROWD_ENGINES} sessions; broker {peak_bytes / 1e9:.2f} GB at peak"
    put(
        compared(
            "reconnect",
            "all agents back after kill -9 of the broker",
            back,
            f"budget of {BACK_GOAL_S:g} s",
            [BACK_GOAL_S],
            goal=1.0,
            note=note,
        )
    )


@contextlib.contextmanager
def crowd(addresses: str) -> Iterator[None]:
    """Run the processes of all engines and agents of the crowd."""
    share = CROWD_ENGINES // CROWD_PROCESSES
    with open_log("crowd") as log:
        started = [
            subprocess.Popen(
                [*CROWD, addresses, f"{number * share}", f"{share}", f"{CROWD_RANKS}"], stderr=log
            )
            for number in range(CROWD_PROCESSES)
        ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def broker_that_knows(addresses: Sequence[str], engines: int, agents: int) -> str:
    """Wait until the broker that leads knows all engines and agents; return its address.

    Standbys answer with the leader's address.
    """
    began_s = time.monotonic()
    known_agents = dict[str, int]()
    with contextlib.ExitStack() as stack:
        admins = {
            address: stack.enter_context(AdminClient(address, timeout_s=30.0))
            for address in addresses
        }
        while time.monotonic() - began_s < CONNECT_S:
            for address, admin in admins.items():
                with contextlib.suppress(RestowError):
                    status = admin.status()
                    known_agents[address] = status.agents
                    if (status.engines, status.agents) == (engines, agents):
                        return status.membership.address or address
            time.sleep(0.1)
    raise RuntimeError(
        f"after {CONNECT_S:g} s brokers know these numbers of agents: {known_agents}"
    )
