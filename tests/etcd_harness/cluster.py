"""Real etcds on loopback, which can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from etcd_harness.binary import etcd_program
from forked.ports import free_port
from forked.signals import send, stop
from restow.broker.registry.etcd_access import EtcdAccess, EtcdError
from restow.broker.registry.etcd_client import EtcdClient, Patience

PATIENT = Patience(call_s=20.0, try_s=4.0)
"""For a machine that is busy with other tests."""
READY_S = 60.0
HOST = "127.0.0.1"


class Member:
    """One etcd process."""

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.port, self.peer_port = free_port(), free_port()
        self._folder, self._options = folder / name, tuple(options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def runs(self) -> bool:
        """Return whether the member was started and not killed."""
        return self._process is not None

    def start(self, cluster: str, scheme: str) -> None:
        """Start the member, or start it again with what it has on disk."""
        client, peer = f"{scheme}://{self.endpoint}", f"http://{HOST}:{self.peer_port}"
        command = [
            str(etcd_program()),
            *("--name", self.name, "--data-dir", str(self._folder)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-state", "new"),
            *self._options,
        ]
        # Of some processors it says that it was never tried on them.
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine}
        if os.uname().machine == "x86_64":
            del environment["ETCD_UNSUPPORTED_ARCH"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        if self._process is not None:
            send(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process.pid)

    def go_on(self) -> None:
        if self._process is not None:
            send(self._process.pid, signal.SIGCONT)


class EtcdCluster:
    """Several of them."""

    def __init__(self, folder: Path, count: int, options: Sequence[str], scheme: str) -> None:
        self.members = [Member(f"m{number}", folder, options) for number in range(count)]
        self._scheme = scheme

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(one.endpoint for one in self.members)

    def start(self, *members: Member) -> None:
        """Start these members, or all."""
        cluster = ",".join(f"{one.name}=http://{HOST}:{one.peer_port}" for one in self.members)
        for one in members or self.members:
            one.start(cluster, self._scheme)

    def kill(self) -> None:
        for one in self.members:
            one.kill()

    async def ready(self, access: EtcdAccess) -> None:
        """Wait until the cluster has a leader."""
        async with client_of(access) as client, asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(EtcdError):
                    if all(one.has_leader for one in await client.statuses()):
                        return
                await asyncio.sleep(0.05)

    async def leader(self, client: EtcdClient) -> Member:
        """Wait for a leader, and return it."""
        async with asyncio.timeout(READY_S):
            while True:
                leaders = [one.endpoint for one in await client.statuses() if one.leads]
                for one in self.members:
                    if [one.endpoint] == leaders:
                        return one
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_etcd(
    folder: Path,
    count: int = 3,
    heartbeat_ms: int = 100,
    election_ms: int = 1000,
    options: Sequence[str] = (),
    access: EtcdAccess | None = None,
) -> AsyncIterator[EtcdCluster]:
    """Run a cluster, and wait for its leader, which is asked with the files of ``access``."""
    timers = ("--heartbeat-interval", str(heartbeat_ms), "--election-timeout", str(election_ms))
    scheme = "http" if access is None else "https"
    cluster = EtcdCluster(folder, count, (*timers, *options), scheme)
    cluster.start()
    try:
        files = access or EtcdAccess(cluster.endpoints)
        await cluster.ready(EtcdAccess(cluster.endpoints, files.ca, files.cert, files.key))
        yield cluster
    finally:
        cluster.kill()


@contextlib.asynccontextmanager
async def client_of(
    access: EtcdAccess | EtcdCluster, patience: Patience = PATIENT
) -> AsyncIterator[EtcdClient]:
    """Yield a client, which is closed at the end."""
    if isinstance(access, EtcdCluster):
        access = EtcdAccess(access.endpoints)
    client = EtcdClient(access, patience)
    try:
        yield client
    finally:
        await client.close()
