"""A storm over several brokers and the members of their etcd."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from random import Random

from chaos_harness.cluster import Cluster
from chaos_harness.fleet import BROKERS, ETCDS, WIRES, Fleet
from chaos_harness.storm import STRATEGIES, Storm
from etcd_harness.binary import survives_kills


class FleetStorm(Storm):
    """What happens to a cluster whose brokers are several."""

    def __init__(self, cluster: Cluster, fleet: Fleet, rng: Random, can_cut: bool) -> None:
        super().__init__(cluster, rng, can_cut)
        self._fleet = fleet
        self._links = WIRES

    def broker_faults(self) -> list[tuple[Callable[[], None], int]]:
        """Return the faults of brokers and of etcd, and how often they come beside other faults.

        A broker is killed or told to stop, and a member of etcd is killed, one of the three at a
        time.
        """
        return [
            (self._kill_one_broker, 4),
            (self._tell_one_broker_to_stop, 2),
            *([(self._kill_one_etcd, 2)] if survives_kills() else []),
        ]

    def start_broker(self) -> None:
        """Start all members of etcd, and all brokers."""
        for name in (*ETCDS, *BROKERS):
            self._start(name)

    def _start(self, name: str) -> None:
        options = ("--strategy", self._rng.choice(STRATEGIES)) if name in BROKERS else ()
        self._fleet.start(name, *options)
        self._cluster.lives[name] += 1

    def _kill_one_broker(self, number: signal.Signals = signal.SIGKILL) -> None:
        there = [name for name in BROKERS if self._is_well(name)]
        if there:
            name = self._rng.choice(there)
            what = "told to stop" if number == signal.SIGTERM else "killed"
            self.faults[f"broker {what}"] += 1
            self._after(self._restart(name, number))

    def _tell_one_broker_to_stop(self) -> None:
        self._kill_one_broker(signal.SIGTERM)

    def _kill_one_etcd(self) -> None:
        """Kill one member of etcd, if all three are well.

        If two of three were killed, what most members have agreed to would be lost.
        """
        if all(self._is_well(name) for name in ETCDS):
            self.faults["etcd killed"] += 1
            self._after(self._restart(self._rng.choice(ETCDS), signal.SIGKILL))

    def _is_well(self, name: str) -> bool:
        one = self._fleet.members[name]
        return one.alive and not one.stopped

    async def _restart(self, name: str, number: signal.Signals) -> None:
        await asyncio.to_thread(self._fleet.end, name, number)
        await asyncio.sleep(self._short_s())
        self._start(name)
