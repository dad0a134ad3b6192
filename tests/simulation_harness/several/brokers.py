"""The brokers of a history: one alone, or several over a model of etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any

from restow.broker.core.common.actions import Action
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.one_of_several import OneOfSeveral
from restow.broker.server.services.agent_service import AgentLinkService
from restow.broker.server.services.broker_service import BrokerService
from restow.v1 import agent_link_pb2_grpc, broker_pb2_grpc
from simulation_harness.network import Listener
from simulation_harness.several.etcd import Etcd, ReachedEtcd
from simulation_harness.several.said import Said
from simulation_harness.virtual_loop import Process

if TYPE_CHECKING:
    from simulation_harness.history import History

ALONE = "broker:1"
SEVERAL = ("b1:1", "b2:1", "b3:1", "b4:1")
GIVEN = 3
"""Of how many engines know the addresses: of the last one they hear from another."""
LEAVES_S = 10.0
"""How long one that leaves by itself waits for what is under way."""
STOPS_S = 0.1


class Life:
    """One life of a broker."""

    def __init__(self, process: Process, address: str) -> None:
        self.process, self.address = process, address
        self.hub: Hub | None = None
        self.fleet: OneOfSeveral | None = None
        self.leaving = False

    @property
    def runs(self) -> bool:
        return self.process.alive and self.hub is not None

    def may_act(self) -> int:
        """Return the epoch in which the broker believes that it may act now; 0: in none."""
        fleet = self.fleet
        if fleet is None or not self.process.alive or self.process.paused:
            return 0
        sure = self.process.context.run(fleet.is_sure)  # by its own clock
        return fleet.epoch if sure else 0


class Brokers:
    """All lives of all of them."""

    def __init__(self, history: History, make_hub: Callable[[], Hub]) -> None:
        self._history, self._make_hub = history, make_hub
        self._loop, self._network = history.loop, history.network
        # Numbers of its own: histories of one broker stay as they are.
        self._rng = Random(history.report.seed + 2)  # noqa: S311
        self.etcd: Etcd | None = None
        self.addresses: tuple[str, ...] = (ALONE,)
        self.lives: list[Life] = []
        self.said: Said | None = None

    def be_several(self) -> None:
        """Play the history with two or three brokers."""
        if self.etcd is None:
            self.etcd = Etcd(self._network, self._rng)
            self.addresses = SEVERAL
            self.said = Said(lambda: self.lives, self._history.found.append)
            self._network.on_said = self.said.look
            self.etcd.on_lead = self.said.begins

    @property
    def several(self) -> bool:
        return self.etcd is not None

    @property
    def given(self) -> str:
        """Return the addresses that engines and agents are given."""
        return ",".join(self.addresses[:GIVEN])

    @property
    def hosts(self) -> Sequence[str]:
        return [_host(address) for address in self.addresses]

    def begin(self) -> None:
        count = self._rng.choice((2, 3, 3)) if self.several else 1
        for address in self.addresses[:count]:
            self.start(address)

    # -- who there is -----------------------------------------------------------------------------

    @property
    def running(self) -> list[Life]:
        return [life for life in self.lives if life.runs]

    @property
    def hubs(self) -> Iterator[Hub]:
        """Return the hubs of all lives."""
        return (life.hub for life in self.lives if life.hub is not None)

    @property
    def leader(self) -> Life | None:
        """Return the life of the broker that leads, if there is one."""
        if self.etcd is None:
            return self.lives[-1] if self.lives and self.lives[-1].hub else None
        leader = self.etcd.keys.leader
        found = [one for one in self.running if leader is not None and one.address == leader[0]]
        return found[-1] if found else None

    def at(self, address: str) -> Life | None:
        """Return the last life of the broker at an address."""
        return next((one for one in reversed(self.lives) if one.address == address), None)

    def missing(self) -> list[str]:
        """Return the addresses at which no broker runs."""
        there = {life.address for life in self.lives if life.process.alive}
        return [address for address in self.addresses if address not in there]

    # -- lives ------------------------------------------------------------------------------------

    def start(self, address: str) -> None:
        """Begin another life at an address, unless a broker runs there."""
        if address not in self.missing():
            return
        pace = self._rng.uniform(0.9, 1.1) if self.several else 1.0
        name = address.partition(":")[0]
        life = Life(Process(self._loop, name, _host(address), pace), address)
        self.lives.append(life)
        life.process.spawn(self._serve(life))

    async def _serve(self, life: Life) -> None:
        hub = life.hub = self._make_hub()
        if self.etcd is not None:
            one = life.fleet = OneOfSeveral(
                ReachedEtcd(self.etcd, life.process),
                life.address,
                hub,
                clock=lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
            )
            hub.standing = one
            life.process.spawn(self._guard(one.run()))
        listener = Listener(life.process)
        broker_pb2_grpc.add_BrokerServicer_to_server(BrokerService(hub), listener)  # type: ignore[arg-type]
        agent_link_pb2_grpc.add_AgentLinkServicer_to_server(AgentLinkService(hub), listener)  # type: ignore[arg-type]
        await listener.intercept()
        self._network.listeners[life.address] = listener
        await self._guard(hub.run_clock())

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the history ends with it
            self._history.found.append(error)

    def kill(self, life: Life) -> None:
        life.process.kill()
        self._network.lost(life.process)

    def leave(self, life: Life) -> None:
        """Let a broker leave as on SIGTERM: it gives up leading, closes its streams and ends."""
        life.leaving = True
        life.process.spawn(self._leave(life))

    async def _leave(self, life: Life) -> None:
        if life.fleet is not None and life.hub is not None:
            try:
                async with asyncio.timeout(LEAVES_S):
                    await life.fleet.leave()
            except TimeoutError:
                pass
            life.hub.close()
        self._loop.call_later(STOPS_S, self._end, life, context=Context())

    def _end(self, life: Life) -> None:
        if life.process.alive:
            self.kill(life)

    def heal(self) -> None:
        """Heal etcd, and start a broker if none is there that stays."""
        if self.etcd is not None:
            self.etcd.heal()
            if not [life for life in self.running if not life.leaving]:
                self.start(self.missing()[0])

    # -- what operators and routers say -----------------------------------------------------------

    def tell_leader(self, say: Callable[[Hub], list[Action]]) -> None:
        """Have the leader do something, if there is one that may act."""
        life = self.leader
        if life is None or (hub := life.hub) is None:
            return

        def tell() -> None:
            if life.fleet is None or life.may_act():
                hub.perform(say(hub))

        life.process.soon(tell)


def _host(address: str) -> str:
    """Return the host of a broker: b for a broker alone."""
    return "b" if address == ALONE else address.partition(":")[0]
