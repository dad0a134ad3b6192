"""How soon handoffs go on when the broker that serves them dies, stands still or leaves.

Three brokers and three members of etcd run as processes on loopback, with real sessions and agents.
200 handoffs a second are requested throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from bench.engine_pairs import EnginePair, RunningPairs, must_be_done, running_pairs
from bench.fleet.broker_killed import (
    BACK_GOAL_S,
    CROWD_ENGINES,
    CROWD_RANKS,
    PAIR,
    PLACES,
    RANKS,
    TOKENS,
    Handoff,
    broker_that_knows,
    crowd,
    not_done,
    steady_load,
)
from bench.model_sizes import tiny_hybrid
from bench.processes import peak_bytes_of, running_broker
from bench.report import Put, compared
from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from fleet_harness.brokers import BrokerProcess, Fleet, running_fleet

SUITE = "failover"
CROWD = CROWD_ENGINES, CROWD_ENGINES * CROWD_RANKS
GOAL_S = {"median": 1.7, "99 %": 3.0}
LEAVES_GOAL_S = 0.4
LEADERLESS_S = 10.0
WARM = 20
SETTLED_S = 3.0
"""Pause between two faults."""
WITHIN_S = 60.0
HEARTBEAT_MS, ELECTION_MS = 50, 500
"""Etcd's settings, as in docs/reliability.md: with its defaults no lease is shorter than 2 s."""


@dataclass
class Load:
    """The handoffs requested so far, and how they ended."""

    fleet: Fleet
    engines: RunningPairs
    handoffs: list[Handoff]

    async def leader(self) -> BrokerProcess:
        """Return the broker that serves P and D."""
        addresses = [broker.address for broker in self.fleet.brokers]
        leading = await asyncio.to_thread(broker_that_knows, addresses, 2, 2 * RANKS)
        return self.fleet.at(leading)

    async def next_done_s(self, after_s: float) -> float:
        """Return when the first handoff after a moment ended as DONE."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                ends = [h.ended_s for h in self.handoffs[-4000:] if h.end == "DONE"]
                later = [end_s for end_s in ends if end_s > after_s]
                if later:
                    return min(later)
                await asyncio.sleep(0.005)

    def longest_pause_s(self, since_s: float) -> float:
        """Return the longest time between two ends as DONE since a moment."""
        ends = sorted(h.ended_s for h in self.handoffs if h.end == "DONE" and h.ended_s > since_s)
        return max(b - a for a, b in itertools.pairwise(ends))


def run(put: Put, repeats: int) -> None:
    """Measure the cost of several brokers, then twenty faults of each kind for nine repeats."""
    times = max(2, repeats * 20 // 9)
    several, alone = uvloop.run(_cost(10 * times))
    case = "a handoff with --etcd, three brokers"
    put(compared(SUITE, case, several, "with one broker alone", alone, goal=1 / 1.05))
    for name, fault, repair, wired in (
        ("killed with -9", _kill, _start, False),
        ("stopped (SIGSTOP)", _stop, _go_on, False),
        ("cut off from all", _cut_off, _heal, True),
    ):
        seconds, note = uvloop.run(_faults(times, fault, repair, wired))
        for what, pick in (("median", None), ("99 %", max)):
            samples = seconds if pick is None else [pick(seconds)]
            case = f"leader {name}: until the next DONE, {what} of {times}"
            budget = f"budget of {GOAL_S[what]:g} s"
            put(compared(SUITE, case, samples, budget, [GOAL_S[what]], goal=1.0, note=note))
    pauses, note = uvloop.run(_leaves(max(2, times // 2)))
    budget = f"budget of {LEAVES_GOAL_S:g} s"
    case = "leader leaves (SIGTERM): longest pause"
    put(compared(SUITE, case, pauses["leader"], budget, [LEAVES_GOAL_S], goal=1.0, note=note))
    for change in ("leaves", "joins"):
        case = f"a standby {change}: longest pause"
        put(compared(SUITE, case, pauses[change], "the same time without", pauses["none"]))
    for lease_s in (1.0, 15.0):
        pause_s, note = uvloop.run(_leaderless(lease_s))
        case = f"etcd without a leader for {LEADERLESS_S:g} s, --member-lease-s {lease_s:g}: pause"
        put(compared(SUITE, case, [pause_s], "the time without", [LEADERLESS_S], note=note))
    seconds, peak_bytes = uvloop.run(_crowd_moves(min(repeats, 4)))
    case = f"{CROWD_ENGINES * CROWD_RANKS} agents, all at another broker after kill -9"
    note = f"{CROWD_ENGINES} sessions; a broker had {peak_bytes / 1e9:.2f} GB at most"
    put(
        compared(
            SUITE, case, seconds, f"budget of {BACK_GOAL_S:g} s", [BACK_GOAL_S], goal=1.0, note=note
        )
    )


async def _cost(turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of handoffs with three brokers, and with a broker alone, in turns."""
    layout, rng = tiny_hybrid(RANKS), np.random.default_rng(0)
    took = dict[str, list[float]]({"several": [], "alone": []})
    with running_broker() as alone:
        async with _fleet(1.0) as (_, fleet):
            pairs = {
                "several": EnginePair((layout, layout), fleet.addresses, 1),
                "alone": EnginePair((layout, layout), alone.address, 1),
            }
            async with running_pairs("cost", pairs, TOKENS) as engines:
                for turn in range(turns + WARM):
                    for pair, seconds in took.items():
                        began_s = time.perf_counter()
                        must_be_done(await engines.attempt(pair, turn, rng))
                        if turn >= WARM:
                            seconds.append(time.perf_counter() - began_s)
    return took["several"], took["alone"]


async def _kill(leader: BrokerProcess) -> None:
    leader.kill()


async def _start(leader: BrokerProcess) -> None:
    await leader.start()


async def _stop(leader: BrokerProcess) -> None:
    leader.stop()


async def _go_on(leader: BrokerProcess) -> None:
    leader.go_on()


async def _cut_off(leader: BrokerProcess) -> None:
    leader.cut_off()


async def _heal(leader: BrokerProcess) -> None:
    leader.heal()


Action = Callable[[BrokerProcess], Awaitable[None]]


@contextlib.asynccontextmanager
async def _fleet(
    lease_s: float, wired: bool = False, brokers: int = 3
) -> AsyncIterator[tuple[EtcdCluster, Fleet]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "fleet"
        folder.mkdir()
        async with (
            running_etcd(Path(name), 3, HEARTBEAT_MS, ELECTION_MS) as etcd,
            running_fleet(
                folder, etcd, brokers, "--member-lease-s", f"{lease_s:g}", wired=wired
            ) as fleet,
        ):
            yield etcd, fleet


@contextlib.asynccontextmanager
async def _load(lease_s: float, wired: bool = False) -> AsyncIterator[tuple[EtcdCluster, Load]]:
    layout = tiny_hybrid(RANKS)
    async with _fleet(lease_s, wired) as (etcd, fleet):
        pairs = {PAIR: EnginePair((layout, layout), fleet.addresses, 1)}
        async with running_pairs("failover", pairs, TOKENS, prompts=PLACES) as engines:
            handoffs: list[Handoff] = []
            tasks: set[asyncio.Task[None]] = set()
            load = asyncio.create_task(steady_load(engines, handoffs, tasks))
            requested = Load(fleet, engines, handoffs)
            try:
                await requested.next_done_s(0.0)
                await asyncio.sleep(SETTLED_S)
                yield etcd, requested
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                async with asyncio.timeout(WITHIN_S):
                    await asyncio.gather(*tasks)


async def _faults(
    times: int, fault: Action, repair: Action, wired: bool
) -> tuple[list[float], str]:
    """Return the seconds from each fault to the next handoff that is DONE."""
    pauses_s = []
    async with _load(1.0, wired) as (_, load):
        for _ in range(times):
            leader = await load.leader()
            await fault(leader)
            began_s = time.monotonic()
            pauses_s.append(await load.next_done_s(began_s + 0.02) - began_s)
            await asyncio.sleep(SETTLED_S)
            await repair(leader)
            await asyncio.sleep(SETTLED_S)
    return pauses_s, _note(load)


async def _leaves(times: int) -> tuple[dict[str, list[float]], str]:
    """Return the longest pauses when the leader leaves, and when a standby leaves or joins.

    ``none`` has the longest pauses of as much time in which no broker leaves or joins.
    """
    pauses_s = dict[str, list[float]](leader=[], leaves=[], joins=[], none=[])
    async with _load(1.0) as (_, load):

        async def watch(change: str, made: Awaitable[None] | None = None) -> None:
            began_s = time.monotonic()
            if made is not None:
                await made
            await asyncio.sleep(SETTLED_S)
            pauses_s[change].append(load.longest_pause_s(began_s))

        for _ in range(times):
            leader = await load.leader()
            standby = next(b for b in load.fleet.brokers if b is not leader)
            await watch("none")
            await watch("leaves", standby.leave())
            await watch("joins", standby.start())
            await watch("leader", leader.leave())
            await leader.start()
            await asyncio.sleep(SETTLED_S)
    return pauses_s, _note(load)


async def _leaderless(lease_s: float) -> tuple[float, str]:
    """Return the longest pause while two of etcd's three members stand still."""
    async with _load(lease_s) as (etcd, load):
        async with client_of(etcd) as client:
            leader = await etcd.leader(client)
        others = [member for member in etcd.members if member is not leader]
        began_s = time.monotonic()
        for member in (leader, others[0]):
            member.stop()
        await asyncio.sleep(LEADERLESS_S)
        for member in (leader, others[0]):
            member.go_on()
        await load.next_done_s(time.monotonic())
        await asyncio.sleep(SETTLED_S)
        return load.longest_pause_s(began_s), _note(load)


async def _crowd_moves(deaths: int) -> tuple[list[float], int]:
    """Return the seconds from each kill until another broker has the crowd, and the peak memory."""
    moves_s, peaks_bytes = [], []
    async with _fleet(1.0, brokers=deaths + 1) as (_, fleet):
        left = {broker.address: broker for broker in fleet.brokers}
        with crowd(fleet.addresses):
            leader = await asyncio.to_thread(broker_that_knows, list(left), *CROWD)
            for _ in range(deaths):
                await asyncio.sleep(SETTLED_S)
                dead = left.pop(leader)
                peaks_bytes.append(peak_bytes_of(dead.pid))
                killed_s = time.monotonic()
                dead.kill()
                leader = await asyncio.to_thread(broker_that_knows, list(left), *CROWD)
                moves_s.append(time.monotonic() - killed_s)
            peaks_bytes.append(peak_bytes_of(left[leader].pid))
    return moves_s, max(peaks_bytes)


def _note(load: Load) -> str:
    failed = not_done(iter(load.handoffs))
    return f"{len(load.handoffs)} handoffs of 2 engines, {2 * RANKS} agents; not DONE: {failed}"
