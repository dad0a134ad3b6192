"""Several brokers as processes, which are killed, stopped and sent away."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from agent_harness.relay import Relay, relayed
from agent_harness.waiting import until
from etcd_harness.cluster import EtcdCluster
from forked.commands import begin
from forked.ports import free_port
from forked.signals import send, stop

HOST = "127.0.0.1"
READY = "restow broker listening on"
READY_S = 60.0
LEASE_S = 2.0


class BrokerProcess:
    """``restow serve`` at one address, in one life after the other."""

    def __init__(self, folder: Path, etcd: Sequence[str], options: Sequence[str]) -> None:
        self.address = self.listens_at = f"{HOST}:{free_port()}"
        """Where clients reach it, and where it listens."""
        self.wires: list[Relay] = []
        """All that it hears and says goes over these, if it has any."""
        self.log = folder / f"{self.address.rpartition(':')[2]}.log"
        self._etcd, self._options = list(etcd), tuple(options)
        self._process: BaseProcess | None = None
        self._lives = 0

    @property
    def pid(self) -> int:
        """Return the process id of the broker that runs now."""
        assert self._process is not None, f"{self.address} does not run"
        assert self._process.pid is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the broker, and wait until it listens."""
        self.begin()
        await until(lambda: self._ready or self.ended, READY_S)
        assert self._ready, self.log.read_text()

    def begin(self) -> None:
        """Start the broker."""
        self._lives += 1
        arguments = ["serve", "--log-format", "json", "--listen", self.listens_at]
        arguments += ["--advertise", self.address, "--etcd", ",".join(self._etcd), *self._options]
        with self.log.open("ab") as log:
            self._process = begin(arguments, (0, log.fileno(), log.fileno()))

    @property
    def _ready(self) -> bool:
        return self.log.read_text().count(READY) == self._lives

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.exitcode is not None

    def kill(self) -> None:
        if self._process is not None:
            send(self.pid, signal.SIGKILL)
            self._process.join()
            self._process = None

    def stop(self) -> None:
        stop(self.pid)

    def go_on(self) -> None:
        send(self.pid, signal.SIGCONT)

    async def wire(self, stack: contextlib.AsyncExitStack) -> None:
        """Have the broker reached over a wire, and reach etcd over others.

        Call this before the broker starts.
        """
        self.wires = [
            await stack.enter_async_context(relayed(at)) for at in (self.listens_at, *self._etcd)
        ]
        self.address, *self._etcd = (one.address for one in self.wires)

    def cut_off(self) -> None:
        """Cut all wires of the broker silently: nothing reaches it, and it reaches nobody."""
        for one in self.wires:
            one.cut()

    def heal(self) -> None:
        for one in self.wires:
            one.heal()

    async def leave(self) -> None:
        """Send the broker away as an operator does, and wait until it has gone."""
        send(self.pid, signal.SIGTERM)
        await until(lambda: self.ended, READY_S)
        self._process = None


class Fleet:
    """Several brokers at one etcd."""

    def __init__(self, folder: Path, etcd: EtcdCluster, count: int, options: Sequence[str]) -> None:
        self.etcd = etcd
        self.brokers = [BrokerProcess(folder, etcd.endpoints, options) for _ in range(count)]

    @property
    def addresses(self) -> str:
        """Return the addresses as clients are given them."""
        return ",".join(one.address for one in self.brokers)

    def at(self, address: str) -> BrokerProcess:
        return next(one for one in self.brokers if one.address == address)


@contextlib.asynccontextmanager
async def running_fleet(
    folder: Path, etcd: EtcdCluster, count: int = 3, *options: str, wired: bool = False
) -> AsyncIterator[Fleet]:
    """Run all brokers, and kill them at the end; ``wired``: they can be cut off."""
    given = ("--fleet", folder.name.lower().replace("_", "-"), *options)
    fleet = Fleet(folder, etcd, count, given)
    async with contextlib.AsyncExitStack() as wires:
        try:
            for one in fleet.brokers:
                if wired:
                    await one.wire(wires)
                await one.start()
            yield fleet
        finally:
            for one in fleet.brokers:
                one.kill()
