"""What goes wrong where there are several brokers, and with the etcd that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation_harness.several.etcd import HOST

if TYPE_CHECKING:
    from simulation_harness.history import History
    from simulation_harness.several.brokers import Life

SIDES = "pde"
RESTORED_S = 5.0
"""How long it takes to restore an etcd: longer than brokers' leases."""
NOTICED_S = 18.0
"""By then all clients know that they are cut off."""


class FleetFaults:
    """Each of `kinds` is one."""

    def __init__(self, history: History) -> None:
        self._history, self._brokers = history, history.brokers
        self._loop, self._network = history.loop, history.network
        self._rng = history.rng
        self.kinds: tuple[Callable[[], None], ...] = (
            self.kill_leader,
            self.pause_leader,
            self.pause_leader,
            self.cut_from_etcd,
            self.cut_from_etcd,
            self.cut_from_agents,
            self.stop_etcd,
            self.slow_etcd,
            self.restore_etcd,
            self.lose_keys,
            self.join_two,
            self.leave_fleet,
        )

    def kill_leader(self) -> None:
        """Kill the leader; it may come back at once, or long after another one leads."""
        if (life := self._leader()) is not None:
            self._brokers.kill(life)
            back_s = self._rng.choice((0.3, 8.0)) * self._rng.random()
            self._loop.call_later(back_s, self._brokers.start, life.address)

    def pause_leader(self) -> None:
        """Pause the leader, often for longer than its lease."""
        if (life := self._leader()) is not None:
            self._network.pause(life.process)
            pause_s = self._rng.choice((1.5, 8.0, 12.0)) * self._rng.random()
            self._loop.call_later(pause_s, life.process.resume)

    def cut_from_etcd(self) -> None:
        """Cut the leader off from etcd alone."""
        if (life := self._leader()) is not None:
            host = life.process.host
            self._network.cut(host, HOST)
            cut_s = self._rng.choice((1.5, 8.0, 60.0)) * self._rng.random()
            self._loop.call_later(cut_s, self._network.heal, host, HOST)

    def cut_from_agents(self) -> None:
        """Cut the leader off from the engines on one host or on all; it keeps its lease."""
        if (life := self._leader()) is not None:
            sides = self._rng.choice((*SIDES, SIDES))
            cut_s = self._rng.choice((2.0, 8.0, 20.0)) * self._rng.random()
            for side in sides:
                self._network.cut(life.process.host, side)
                self._loop.call_later(cut_s, self._network.heal, life.process.host, side)

    def cut_off_and_kill_the_next(self) -> None:
        """Cut a leader off from etcd and engines, and kill the next leader when they are back.

        Engines then come back to a broker that etcd does not reach, which knows nothing of another.
        """
        if (life := self._leader()) is not None:
            host = life.process.host
            for other, cut_s in ((HOST, 40.0), *((side, NOTICED_S) for side in SIDES)):
                self._network.cut(host, other)
                self._loop.call_later(cut_s, self._network.heal, host, other)
            self._loop.call_later(NOTICED_S + 1.0, self.kill_leader)

    def stop_etcd(self) -> None:
        """Leave etcd without a leader for a while."""
        if (etcd := self._brokers.etcd) is not None:
            self._history.hinder()
            etcd.lose_leader()
            self._loop.call_later(
                self._rng.choice((1.5, 10.0)) * self._rng.random(), etcd.find_leader
            )

    def slow_etcd(self) -> None:
        """Slow down every message to etcd and from it."""
        if (etcd := self._brokers.etcd) is not None:
            self._history.hinder()
            etcd.slowness = self._rng.choice((10.0, 100.0))
            self._loop.call_later(5.0 * self._rng.random(), setattr, etcd, "slowness", 1.0)

    def restore_etcd(self) -> None:
        """Restore etcd as it was a while ago, or empty, after a time longer than leases."""
        if (etcd := self._brokers.etcd) is not None:
            self._history.hinder()
            etcd.back_up(empty=self._rng.random() < 0.5)
            down_s = self._rng.uniform(0.5, 8.0)
            self._loop.call_later(down_s, etcd.lose_leader)
            self._loop.call_later(down_s + RESTORED_S + 0.01, etcd.restore, RESTORED_S)

    def lose_keys(self) -> None:
        """Delete the key of a broker, or that of the leader, while its lease lives."""
        if (etcd := self._brokers.etcd) is not None:
            if self._rng.random() < 0.5 and self._brokers.said is not None:
                # Another broker leads before this one has looked: clients tell them apart.
                self._brokers.said.looks = False
                etcd.keys.leader = None
            elif etcd.keys.brokers:
                del etcd.keys.brokers[self._rng.choice(sorted(etcd.keys.brokers))]

    def join_two(self) -> None:
        """Start two brokers at once, or one where only one is missing."""
        for address in self._brokers.missing()[:2]:
            self._brokers.start(address)

    def leave_fleet(self) -> None:
        """Let a broker leave that is not the last one; it comes back some time after."""
        staying = [one for one in self._brokers.running if not one.leaving]
        if len(staying) > 1:
            leader = self._brokers.leader
            life = leader if leader in staying and self._rng.random() < 0.7 else None
            life = life or self._rng.choice(staying)
            self._brokers.leave(life)
            self._loop.call_later(self._rng.uniform(5.0, 20.0), self._brokers.start, life.address)

    def _leader(self) -> Life | None:
        """Return the leader, which a fault is to meet, if it runs."""
        self._history.hinder()
        life = self._brokers.leader
        return life if life is not None and life.runs and not life.process.paused else None
