"""A cluster whose every step a test decides."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from random import Random
from types import MappingProxyType

from chaos_harness.cluster import Cluster
from chaos_harness.hosts import Hosts
from chaos_harness.model import PAGE_TOKENS
from restow.broker.families import ConvLayout
from stamped.requests import Prompt

GRANT_S, SETTLE_GRACE_S, QUARANTINE_S = 2.0, 2.0, 1.0
TRIES = 5
HASTY = ("--grant-s", f"{GRANT_S}", "--settle-grace-s", f"{SETTLE_GRACE_S}")
"""For reads that are to fail: a slow machine may miss such grants where all is well."""
PATIENT = ("--grant-s", "30", "--settle-grace-s", f"{SETTLE_GRACE_S}")


def prompt(name: str, pages: int = 4, **how: float) -> Prompt:
    """Return a prompt that is patient on both sides, unless told otherwise."""
    patient: dict[str, float] = {"lease_ms": 30_000, "hold_ms": 60_000, "timeout_ms": 30_000}
    chosen = {**patient, "compute_s": 0.0, **how}
    return Prompt(name, pages * PAGE_TOKENS - 1, **chosen)  # type: ignore[arg-type]


class Scene:
    """Short words for what tests do."""

    def __init__(self, cluster: Cluster, tps: tuple[int, int]) -> None:
        self.cluster, self._tps = cluster, dict(zip("PD", tps, strict=True))

    def start(self, side: str) -> None:
        conv = ConvLayout.DS if side == "P" else ConvLayout.SD
        self.cluster.start_engine(side, self._tps[side], conv)

    async def replace(self, side: str) -> None:
        """Start a new life of an engine, and wait until it is connected."""
        self.cluster.end_engine(side)
        self.start(side)
        await self.cluster.connected()

    async def restart_broker(self, *options: str) -> None:
        """Kill the broker, and start it again at once, empty."""
        await self.cluster.end_broker()
        self.cluster.start_broker(*options)

    async def ready(self, one: Prompt) -> None:
        """Have P publish the whole state, and wait until the state is ready."""
        self.cluster.prefill(one)
        await self.cluster.reaches(one.name, "READY")

    async def reading(self, one: Prompt) -> None:
        """Have D read the state without an end, because a rank of P is stopped."""
        await self.ready(one)
        self.cluster.worker("P.0").stop()
        self.cluster.decode(one)
        await self.cluster.reaches(one.name, "READING")

    async def ends(self, name: str, side: str = "D", within_s: float = 60.0) -> tuple[str, str]:
        """Return the state and the reason that one side was told."""
        return await self.cluster.ended(side, name, within_s)

    async def hand_over(self, one: Prompt) -> tuple[str, str]:
        """Hand a state over, and return how the handoff ended for D.

        After a handoff that is DONE, P has heard so, too.
        """
        self.cluster.prefill(one)
        self.cluster.decode(one)
        if (end := await self.ends(one.name)) == ("DONE", ""):
            await self.ends(one.name, "P")
        return end

    async def heals(self, within_s: float = 60.0) -> None:
        """Check that the cluster is well again after faults.

        All pages and all staging are back, no page was written to late, and the next handoff is
        served.
        """
        left = await self.cluster.finished(within_s)
        assert not left
        said = len(self.cluster.found.said)
        for number in range(TRIES):
            end = await self.hand_over(prompt(f"after {said}, {number}"))
            if end == ("DONE", ""):
                break
        assert end == ("DONE", "")
        assert self.cluster.found.violations == []


@contextlib.asynccontextmanager
async def scene(
    tps: tuple[int, int] = (1, 2),
    hosts: Hosts | None = None,
    options: tuple[str, ...] = PATIENT,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Scene]:
    """Run P and D of these sizes, connected."""
    rng = Random(1)  # noqa: S311 - reproducible, not secret
    cluster = Cluster(
        rng,
        hosts,
        quarantine_s=QUARANTINE_S,
        broker_options=options,
        broker_environment=environment,
    )
    async with cluster:
        made = Scene(cluster, tps)
        try:
            cluster.start_broker()
            for side in "PD":
                made.start(side)
            await cluster.connected()
            await cluster.whole()
            yield made
        except BaseException as error:
            error.add_note(cluster.story())
            raise
