"""The owner of a pool dies, stands still or leaves under a steady load: when handoffs go on.

Three brokers and three members of etcd, each a process, on loopback; real engines' sessions, and
agents with NIXL in a process for each rank. 200 handoffs a second are asked for throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from crowd import RANKS as CROWD_RANKS
from killed import KIND, RANKS, TOKENS, Handoff, small_layout, steady_load
from restarts import (
    BACK_GOAL_S,
    CONNECT_S,
    ENGINES,
    crowd,
    peak_bytes_of,
    serve,
    whole_at,
)
from rows import Yield, compared
from scene import Engines, Scene, scene

from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from fleet_harness.brokers import BrokerProcess, Fleet, running_fleet

SUITE = "failover"
GOAL_S = {"median": 1.5, "99 %": 3.0}
PAUSE_GOAL_S = 1.0
LEADERLESS_S = 10.0
WARM = 20
SETTLED_S = 3.0
"""Between two faults."""
WITHIN_S = 60.0
HEARTBEAT_MS, ELECTION_MS = 50, 500
"""Of etcd, as docs/reliability.md says: with its defaults no lease is shorter than 2 s."""


@dataclass
class Load:
    """Handoffs asked for so far, and what became of them."""

    fleet: Fleet
    made: Scene
    handoffs: list[Handoff]

    def owner(self) -> BrokerProcess:
        """The broker at which P is."""
        return self.fleet.at(self.made.sessions["P", KIND]._brokers.current)

    async def next_done_s(self, after_s: float) -> float:
        """When the first handoff ended DONE after a moment."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                ends = [h.ended_s for h in self.handoffs[-4000:] if h.end == "DONE"]
                later = [one for one in ends if one > after_s]
                if later:
                    return min(later)
                await asyncio.sleep(0.005)

    def longest_pause_s(self, since_s: float) -> float:
        """Between two ends as DONE, since a moment."""
        ends = sorted(h.ended_s for h in self.handoffs if h.end == "DONE" and h.ended_s > since_s)
        return max(b - a for a, b in itertools.pairwise(ends))

    def failed(self) -> str:
        """How many ended otherwise, in words."""
        ends = Counter(h.end for h in self.handoffs if h.ended_s and h.end != "DONE")
        return ", ".join(f"{count} {end}" for end, count in ends.items()) or "none"


def run(put: Yield, repeats: int) -> None:
    """Twenty faults of a kind for nine repeats, which are the default."""
    times = max(2, repeats * 20 // 9)
    several, alone = uvloop.run(_cost(10 * times))
    case = "a handoff with --etcd, three brokers"
    put(compared(SUITE, case, several, "one that is alone", alone, goal=1 / 1.05))
    for name, fault, mended, wired in (
        ("killed with -9", _kill, _start, False),
        ("stopped (SIGSTOP)", _stop, _go_on, False),
        ("cut off from all", _cut_off, _heal, True),
    ):
        seconds, note = uvloop.run(_faults(times, fault, mended, wired))
        for what, pick in (("median", None), ("99 %", max)):
            found = seconds if pick is None else [pick(seconds)]
            case = f"owner {name}: until the next DONE, {what} of {times}"
            budget = f"budget of {GOAL_S[what]:g} s"
            put(compared(SUITE, case, found, budget, [GOAL_S[what]], goal=1.0, note=note))
    pauses, note = uvloop.run(_leaves(max(2, times // 2)))
    budget = f"budget of {PAUSE_GOAL_S:g} s"
    case = "a broker leaves (SIGTERM) and joins again: longest pause"
    put(compared(SUITE, case, [max(pauses)], budget, [PAUSE_GOAL_S], goal=1.0, note=note))
    for lease_s in (1.0, 15.0):
        pause_s, note = uvloop.run(_leaderless(lease_s))
        case = f"etcd without a leader for {LEADERLESS_S:g} s, --member-lease-s {lease_s:g}: pause"
        put(compared(SUITE, case, [pause_s], "that time", [LEADERLESS_S], note=note))
    seconds, peak_bytes = uvloop.run(_crowd_moves(min(repeats, 4)))
    case = f"{ENGINES * CROWD_RANKS} agents, all at another broker after kill -9"
    note = f"{ENGINES} sessions; a broker had {peak_bytes / 1e9:.2f} GB at most"
    put(
        compared(
            SUITE, case, seconds, f"budget of {BACK_GOAL_S:g} s", [BACK_GOAL_S], goal=1.0, note=note
        )
    )


async def _cost(turns: int) -> tuple[list[float], list[float]]:
    """Seconds of handoffs with a broker of three, and with one that is alone, in turns."""
    layout, rng = small_layout(), np.random.default_rng(0)
    broker, address = serve("127.0.0.1:0")
    took = dict[str, list[float]]({"several": [], "alone": []})
    try:
        async with _fleet(1.0) as (_, fleet):
            kinds = {
                "several": Engines((layout, layout), fleet.addresses, 1),
                "alone": Engines((layout, layout), address, 1),
            }
            async with scene("cost", kinds, TOKENS) as made:
                for turn in range(turns + WARM):
                    for kind, seconds in took.items():
                        began_s = time.perf_counter()
                        ended = await made.asked(kind, f"{turn}", rng)
                        if not ended.done:
                            raise RuntimeError(f"{turn}: {ended.reason}: {ended.detail}")
                        if turn >= WARM:
                            seconds.append(time.perf_counter() - began_s)
    finally:
        broker.kill()
        broker.wait()
    return took["several"], took["alone"]


async def _kill(owner: BrokerProcess) -> None:
    owner.kill()


async def _start(owner: BrokerProcess) -> None:
    await owner.start()


async def _stop(owner: BrokerProcess) -> None:
    owner.stop()


async def _go_on(owner: BrokerProcess) -> None:
    owner.go_on()


async def _cut_off(owner: BrokerProcess) -> None:
    owner.cut_off()


async def _heal(owner: BrokerProcess) -> None:
    owner.heal()


Doing = Callable[[BrokerProcess], Awaitable[None]]


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
    layout = small_layout()
    async with _fleet(lease_s, wired) as (etcd, fleet):
        kinds = {KIND: Engines((layout, layout), fleet.addresses, 1)}
        async with scene("failover", kinds, TOKENS) as made:
            handoffs: list[Handoff] = []
            tasks: set[asyncio.Task[None]] = set()
            load = asyncio.create_task(steady_load(made, handoffs, tasks))
            one = Load(fleet, made, handoffs)
            try:
                await one.next_done_s(0.0)
                await asyncio.sleep(SETTLED_S)
                yield etcd, one
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                async with asyncio.timeout(WITHIN_S):
                    await asyncio.gather(*tasks)


async def _faults(times: int, fault: Doing, mended: Doing, wired: bool) -> tuple[list[float], str]:
    """Seconds from each fault to the next handoff that is DONE."""
    found = []
    async with _load(1.0, wired) as (_, load):
        for _ in range(times):
            owner = load.owner()
            await fault(owner)
            began_s = time.monotonic()
            found.append(await load.next_done_s(began_s + 0.02) - began_s)
            await asyncio.sleep(SETTLED_S)
            await mended(owner)
            await asyncio.sleep(SETTLED_S)
    return found, _note(load)


async def _leaves(times: int) -> tuple[list[float], str]:
    """The longest pause around each time that the owner leaves and comes back."""
    found = []
    async with _load(1.0) as (_, load):
        for _ in range(times):
            owner, began_s = load.owner(), time.monotonic()
            await owner.leave()
            await asyncio.sleep(SETTLED_S)
            await owner.start()
            await asyncio.sleep(SETTLED_S)
            found.append(load.longest_pause_s(began_s))
    return found, _note(load)


async def _leaderless(lease_s: float) -> tuple[float, str]:
    """The longest pause while two of etcd's three members stand still."""
    async with _load(lease_s) as (etcd, load):
        async with client_of(etcd) as client:
            leader = await etcd.leader(client)
        others = [one for one in etcd.members if one is not leader]
        began_s = time.monotonic()
        for one in (leader, others[0]):
            one.stop()
        await asyncio.sleep(LEADERLESS_S)
        for one in (leader, others[0]):
            one.go_on()
        await load.next_done_s(time.monotonic())
        await asyncio.sleep(SETTLED_S)
        return load.longest_pause_s(began_s), _note(load)


async def _crowd_moves(deaths: int) -> tuple[list[float], int]:
    """Seconds from each death of the owner of all until another has all; a broker's most bytes."""
    found, peaks_bytes = [], []
    async with _fleet(1.0, brokers=deaths + 1) as (_, fleet):
        left = {one.address: one for one in fleet.brokers}
        with crowd(fleet.addresses):
            owner = await asyncio.to_thread(whole_at, list(left), CONNECT_S)
            for _ in range(deaths):
                await asyncio.sleep(SETTLED_S)
                dead = left.pop(owner)
                peaks_bytes.append(peak_bytes_of(dead.pid))
                killed_s = time.monotonic()
                dead.kill()
                owner = await asyncio.to_thread(whole_at, list(left), CONNECT_S)
                found.append(time.monotonic() - killed_s)
            peaks_bytes.append(peak_bytes_of(left[owner].pid))
    return found, max(peaks_bytes)


def _note(load: Load) -> str:
    return (
        f"{len(load.handoffs)} handoffs of 2 engines, {2 * RANKS} agents; not DONE: {load.failed()}"
    )
