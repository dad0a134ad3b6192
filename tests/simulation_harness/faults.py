"""What goes wrong in a history, and when."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from restow.v1 import broker_pb2
from simulation_harness.virtual_loop import Process

if TYPE_CHECKING:
    from simulation_harness.engines import Engine
    from simulation_harness.history import History
    from simulation_harness.network import _Call
    from simulation_harness.several.brokers import Life

DRAIN_S = 20.0
LINKS = (("b", "p"), ("b", "d"), ("p", "d"), ("b", "e"), ("p", "e"))
SIDES = "PDE"


class Faults:
    """Up to four of them, at a time or at a step."""

    def __init__(self, history: History) -> None:
        self.met_d = False
        """Whether one met D, the broker or what lies between them."""
        self._history, self._rng = history, history.rng
        self._loop, self._network = history.loop, history.network
        self._triggers: dict[int, Callable[[], None]] = {}
        self.kinds: tuple[Callable[[], None], ...] = (
            self.kill_broker,
            self.lose_an_end,
            self._kill_engine,
            self._kill_worker,
            self.replace_worker,
            self.restart_alike,
            self._pause,
            self._pause,
            self.stall,
            self.restart_unseen,
            self._cut,
            self._break,
            self._vanish,
            self.leave,
        )
        """Of which each is one."""

    def plan(self, within_s: float) -> None:
        """Decide which faults happen, and when."""
        self._network.on_delivery = self._count
        for _ in range(self._rng.randint(0, 4)):
            fault = self._rng.choice(self.kinds)
            if self._rng.random() < 0.7:  # at a step, whatever the time is
                self._triggers[self._rng.randint(20, 150)] = fault
            else:
                self._loop.call_later(self._rng.uniform(0.0, within_s), self._do, fault)

    def heal(self) -> None:
        """End all faults and undo those that happened."""
        self._triggers.clear()
        self._network.loses = lambda call, batch: False
        self._network.heal_all()
        for process in self._history.processes():
            if process.paused:
                process.resume()

    def _count(self, delivered: int) -> None:
        fault = self._triggers.pop(delivered, None)
        if fault is not None:
            self._do(fault)

    def _do(self, fault: Callable[[], None]) -> None:
        name = fault.__name__.strip("_")
        self._history.report.faults.append(f"{self._loop.time():.3f} {name}")
        fault()

    def _detail(self, words: object) -> None:
        self._history.report.faults[-1] += f" {words}"

    def _short_s(self) -> float:
        return self._rng.choice((0.02, 3.0)) * self._rng.random()

    # -- who dies ---------------------------------------------------------------------------------

    def _kill(self, process: Process) -> None:
        self.met_d |= process.host != "p"
        process.kill()
        self._network.lost(process)

    def kill_broker(self) -> None:
        brokers = self._history.brokers
        life = brokers.leader
        if life is not None and life.process.alive:
            self.met_d = True
            brokers.kill(life)
            self._loop.call_later(self._short_s(), brokers.start, life.address)

    def lose_an_end(self) -> None:
        """Kill the leader between telling P and telling D of the next DONE, in either order."""
        self.met_d = True
        loser = self._rng.choice("PD")
        self._detail(loser)
        brokers, network = self._history.brokers, self._network
        lost: list[_Call] = []

        def loses(call: _Call, batch: Any) -> bool:
            life = brokers.leader
            if lost or life is None or call.server is not life.process:
                return call in lost
            if loser in _told_done(batch):
                lost.append(call)
                # D is told first, and P soon after that.
                killed_s = self._rng.uniform(0.006, 0.03)
                self._loop.call_later(killed_s, self._kill_life, life, context=Context())
            return call in lost

        network.loses = loses

    def _kill_life(self, life: Life) -> None:
        self._network.loses = lambda call, batch: False
        if life.process.alive:
            self._history.brokers.kill(life)
            self._loop.call_later(self._short_s(), self._history.brokers.start, life.address)

    def _kill_engine(self) -> None:
        self.end_engine(self._rng.choice(SIDES))

    def end_engine(self, side: str, again: bool = False) -> None:
        """Kill all processes of an engine; it starts again soon, as another life or the same."""
        engine = self._history.lives[side][-1]
        if engine.scheduler.alive:
            for process in engine.processes:
                self._kill(process)
            self._loop.call_later(self._short_s(), self._history.start_engine, side, again)

    def restart_unseen(self) -> None:
        """Start P again while the broker can't see it."""
        self._cut_hosts("b", "p")
        self.end_engine("P")
        self._loop.call_later(self._rng.uniform(1.0, 10.0), self._heal_hosts, "b", "p")

    def restart_alike(self) -> None:
        """Start an engine again under the incarnation that it had."""
        self._detail(side := self._rng.choice(SIDES))
        self.end_engine(side, again=True)

    def replace_worker(self) -> None:
        """Kill a rank's process; its engine starts another one for the rank."""
        engine = self._history.lives[self._rng.choice(SIDES)][-1]
        number = self._rng.randrange(len(engine.workers))
        worker = engine.workers[number]
        self._detail(worker.name)
        if worker.alive:
            self._kill(worker)
            self._loop.call_later(self._short_s(), engine.replace_worker, number)

    def _kill_worker(self) -> None:
        """Kill a rank's process; its engine ends soon after."""
        side = self._rng.choice(SIDES)
        engine = self._history.lives[side][-1]
        worker = self._rng.choice(engine.workers)
        if worker.alive:
            self._kill(worker)
            self._loop.call_later(self._short_s(), self.end_engine, side)

    # -- who leaves -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Drain an engine, and end it when nothing of it is open or it has waited long enough."""
        side = self._rng.choice(SIDES)
        engine = self._history.lives[side][-1]
        self.met_d |= side != "P"
        self._detail(side)
        engine.spawn(self._drain(engine))

    async def _drain(self, engine: Engine) -> None:
        if engine.session is not None and await engine.session.drain(DRAIN_S):
            self._history.check_drained(engine)
        # Its requests hear how they ended; and what begins the next life is no part of this one.
        self._loop.call_later(0.01, self._end_life, engine, context=Context())

    def _end_life(self, engine: Engine) -> None:
        if engine is self._history.lives[engine.side][-1]:
            self.end_engine(engine.side)

    # -- who stands still -------------------------------------------------------------------------

    def _pause(self) -> None:
        process = self._rng.choice([p for p in self._history.processes() if p.alive])
        self.met_d |= process.host != "p"
        self._network.pause(process)
        self._detail(process.name)
        self._loop.call_later(self._rng.choice((1.0, 20.0)) * self._rng.random(), process.resume)

    def stall(self) -> None:
        """Pause a rank of P until all faults heal."""
        self._rng.choice(self._history.lives["P"][-1].workers).pause()

    # -- who can't reach whom ---------------------------------------------------------------------

    def _break(self) -> None:
        self.met_d = True
        self._network.break_one()

    def _vanish(self) -> None:
        """Cut an engine off until the broker or an operator has forgotten it."""
        host = self._rng.choice(SIDES).lower()
        self.met_d |= host != "p"
        self._cut_hosts("b", host)
        self._detail(host)
        self._loop.call_later(self._rng.uniform(25.0, 45.0), self._heal_hosts, "b", host)
        self._loop.call_later(self._rng.uniform(16.0, 40.0), self._history.forget, host.upper())

    def _cut(self) -> None:
        hosts = self._rng.choice(LINKS)
        self.met_d |= hosts in (("b", "d"), ("b", "e"))
        self._cut_hosts(*hosts)
        self._detail(hosts)
        self._loop.call_later(self._rng.uniform(0.1, 25.0), self._heal_hosts, *hosts)

    def _cut_hosts(self, host: str, other: str) -> None:
        """Cut two hosts off from each other; ``b`` stands for all brokers."""
        for one in self._history.brokers.hosts if host == "b" else (host,):
            self._network.cut(one, other)

    def _heal_hosts(self, host: str, other: str) -> None:
        for one in self._history.brokers.hosts if host == "b" else (host,):
            self._network.heal(one, other)


def _told_done(batch: Any) -> set[str]:
    """Return the sides that a broker's batch tells of a DONE."""
    events = batch.events if isinstance(batch, broker_pb2.SessionResponse) else ()
    done = [one.ended for one in events if one.ended.state == broker_pb2.HANDOFF_STATE_DONE]
    return {"D" if one.demand else "P" for one in done}
