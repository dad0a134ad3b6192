"""What READY states outlive, whether a burst is handed over whole, and what a dead D costs P.

Real sessions, real agents and NIXL in a process for each rank. Each row counts how many handoffs
were DONE, and is the time that all took beside that of as many without the trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import uvloop
from killed import small_layout, whole
from restarts import serve
from rows import Yield, compared
from scene import Engines, Scene, scene
from two_hosts import TwoHosts, two_hosts

from agent_harness.relay import relayed
from chaos.scene import PATIENT, prompt
from chaos.scene import scene as chaos
from restow.broker.client import Delivery
from restow.broker.errors import RestowError
from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span

KIND = "outage"
TOKENS = 256
READY_RESET = 200
RESETS_HANDOFFS, RESETS_EVERY_S, LOAD_PER_S = 400, 2.0, 20
READY_RESTART = 6000
READY_FOR_S = 70.0
BURST, BURST_BYTES = 600, 64 << 20
PATIENCE_MS = 300_000
TCP = {"UCX_TLS": "tcp"}
KILLS = 5
FREE_WITHIN_S = 3.0


def run(put: Yield, repeats: int) -> None:
    """Each once, whatever ``repeats`` is: they take minutes."""
    uvloop.run(_reset(put))
    uvloop.run(_resets(put))
    uvloop.run(_restart(put))
    uvloop.run(_burst(put))
    uvloop.run(_dead_reader(put))


async def _reset(put: Yield) -> None:
    broker, address = serve("127.0.0.1:0")
    try:
        async with relayed(address) as relay, _small("reset", relay.address) as made:

            async def trouble() -> None:
                relay.reset()

            case = f"{READY_RESET} READY, all connections reset"
            await _outlived(put, case, made, READY_RESET, trouble)
    finally:
        broker.kill()
        broker.wait()


async def _resets(put: Yield) -> None:
    """A steady load, without resets and with."""
    broker, address = serve("127.0.0.1:0")
    try:
        async with relayed(address) as relay, _small("resets", relay.address) as made:

            async def reset_often() -> None:
                while True:
                    await asyncio.sleep(RESETS_EVERY_S)
                    relay.reset()

            quiet_s, _ = await _load(made, "a")
            resetting = asyncio.create_task(reset_often())
            try:
                seconds, ends = await _load(made, "b")
            finally:
                resetting.cancel()
            case = f"{RESETS_HANDOFFS} under load, all connections reset every {RESETS_EVERY_S:g} s"
            _put(put, case, seconds, quiet_s, ends)
    finally:
        broker.kill()
        broker.wait()


async def _restart(put: Yield) -> None:
    broker, address = serve("127.0.0.1:0")
    try:
        async with _small("restart", address) as made:

            async def trouble() -> None:
                nonlocal broker
                await asyncio.sleep(READY_FOR_S)
                broker.kill()
                broker.wait()
                broker, _ = await asyncio.to_thread(serve, address)
                await whole(address)

            case = f"{READY_RESTART} READY for {READY_FOR_S:g} s, the broker killed and started"
            await _outlived(put, case, made, READY_RESTART, trouble)
    finally:
        broker.kill()
        broker.wait()


@contextlib.asynccontextmanager
async def _small(name: str, address: str) -> AsyncIterator[Scene]:
    """Engines of small states, once the broker knows them and what reading costs."""
    kinds = {KIND: Engines((small_layout(),) * 2, address, 1)}
    async with scene(name, kinds, TOKENS) as made:
        await whole(address)
        await _ask(made, await _ready(made, "first", 20))
        yield made


async def _outlived(
    put: Yield, case: str, made: Scene, count: int, trouble: Callable[[], Awaitable[None]]
) -> None:
    """What D gets of so many READY states after a trouble, beside as many without."""
    before_s, _ = await _ask(made, await _ready(made, "a", count))
    ready = await _ready(made, "b", count)
    await trouble()
    after_s, ends = await _ask(made, ready)
    _put(put, case, after_s, before_s, ends)


async def _burst(put: Yield) -> None:
    """All at once, and then one after another, from one host to another."""
    with two_hosts() as hosts:
        await _burst_between(put, hosts)


async def _burst_between(put: Yield, hosts: TwoHosts) -> None:
    broker, address = serve(f"{hosts.address}:0", "--insecure")
    try:
        kinds = {KIND: Engines((_run_layout(),) * 2, address, 1, host_reads=False)}
        async with scene("burst", kinds, 1, environment=TCP, before=hosts.commands) as made:
            await whole(address, ranks=1)
            await _ask(made, await _ready(made, "first", 2))
            ready = await _ready(made, "a", BURST)
            burst_s, ends = await _ask(made, ready)
            few = await _ready(made, "b", BURST // 10)
            began_s = time.monotonic()
            for name in few:
                await _ask(made, [name])
            each_s = (time.monotonic() - began_s) / len(few)
            case = f"{BURST} of {BURST_BYTES >> 20} MiB at once over TCP between two hosts"
            _put(put, case, burst_s, each_s * BURST, ends, "one after another")
    finally:
        broker.kill()
        broker.wait()


async def _dead_reader(put: Yield) -> None:
    """All processes of D are killed while a rank of P, which is stopped, has it wait in a read."""
    seconds, ends = [], Counter[str]()
    for _ in range(KILLS):
        async with chaos(options=PATIENT) as world:
            await world.hand_over(prompt("before"))
            await world.reading(prompt("read"))
            world.cluster.end_engine("D")
            began_s = time.monotonic()
            ends[str((await world.ends("read", "P"))[1])] += 1
            seconds.append(time.monotonic() - began_s)
    note = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    case, budget = (
        "P's pages are free after D was killed in a read",
        f"budget of {FREE_WITHIN_S:g} s",
    )
    put(compared("outages", case, seconds, budget, [FREE_WITHIN_S], goal=1.0, note=note))


async def _ready(made: Scene, name: str, count: int) -> list[str]:
    """So many handoffs that P has published."""
    rng = np.random.default_rng(0)
    names = [f"{name}{number}" for number in range(count)]
    for number, one in enumerate(names):
        made.publish(KIND, one, rng)
        if number % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(2.0)
    return names


async def _load(made: Scene, name: str) -> tuple[float, Counter[str]]:
    """Seconds until all handoffs of a steady load have ended, and how."""
    rng = np.random.default_rng(2)
    began_s = time.monotonic()
    asked = []
    for number in range(RESETS_HANDOFFS):
        made.publish(KIND, f"{name}{number}", rng)
        asked.append(made.ask(KIND, f"{name}{number}", rng, PATIENCE_MS))
        await asyncio.sleep(1 / LOAD_PER_S)
    ends = await _ends(asked)
    return time.monotonic() - began_s, ends


async def _ask(made: Scene, names: list[str]) -> tuple[float, Counter[str]]:
    """Seconds until all have ended, and how."""
    rng = np.random.default_rng(1)
    began_s = time.monotonic()
    ends = await _ends([made.ask(KIND, name, rng, PATIENCE_MS) for name in names])
    return time.monotonic() - began_s, ends


async def _ends(asked: list[Delivery]) -> Counter[str]:
    """How they ended, once they all have."""
    ends: Counter[str] = Counter()
    for ended in asyncio.as_completed(asked):
        try:
            end = await ended
            ends[end.reason or end.state] += 1
        except RestowError as error:
            ends[error.reason] += 1
    return ends


def _put(
    put: Yield,
    case: str,
    seconds: float,
    reference_s: float,
    ends: Counter[str],
    reference: str = "as many without",
) -> None:
    note = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    put(compared("outages", case, [seconds], reference, [reference_s], note=note))


def _run_layout() -> Layout:
    """One rank, one run of bytes."""
    shard = Shard("run", (Span(0, BURST_BYTES),), DType.UINT8, "run", 0, (1,))
    rank = RankLayout(0, (Region("run", "state", BURST_BYTES, None),), (shard,))
    fields = (Field("run", Kind.SNAPSHOT, ("byte",), (BURST_BYTES,)),)
    return Layout(Model("run", fields), (rank,))
