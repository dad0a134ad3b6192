"""Several brokers and the members of their etcd, each on a host of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from chaos_harness.hosts import Hosts
from chaos_harness.lives import BrokerLife, ProgramLife
from etcd_harness.binary import etcd_program
from forked.ports import free_port

BROKERS, ETCDS = ("b1", "b2", "b3"), ("e1", "e2", "e3")
WIRES = (
    *((broker, side) for broker in BROKERS for side in "pd"),
    *((broker, etcd) for broker in BROKERS for etcd in ETCDS),
    ("e1", "e2"),
    ("e1", "e3"),
    ("e2", "e3"),
    ("p", "d"),
)
"""Brokers do not speak to each other."""
LEASE_S = 1.0
TIMERS = ("--heartbeat-interval", "50", "--election-timeout", "500")


class Fleet:
    """All of them, by name."""

    def __init__(self, folder: Path, hosts: Hosts | None) -> None:
        """Prepare a fleet, which runs on one host if there are no ``hosts``."""
        self._folder, self._hosts = folder, hosts
        self.members: dict[str, ProgramLife] = {}
        self._ports = {name: free_port() for name in (*BROKERS, *ETCDS)}
        self._peer_ports = {name: free_port() for name in ETCDS}

    @property
    def addresses(self) -> str:
        """Return the addresses of the brokers, as clients are given them."""
        return ",".join(self._at(name) for name in BROKERS)

    def start(self, name: str, *options: str) -> None:
        """Start a new life of a broker or of a member of etcd, with what it had on disk."""
        if name in ETCDS:
            self.members[name] = self._etcd(name)
        else:
            self.members[name] = self._broker(name, options)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a broker or a member of etcd, or ask it to stop; return the exit status.

        This blocks.
        """
        return self.members[name].end(number)

    def _host(self, name: str) -> str:
        return "127.0.0.1" if self._hosts is None else self._hosts.primary(name)

    def _at(self, name: str) -> str:
        return f"{self._host(name)}:{self._ports[name]}"

    def _namespace(self, name: str) -> str:
        return "" if self._hosts is None else self._hosts.namespace(name)

    def _broker(self, name: str, options: tuple[str, ...]) -> BrokerLife:
        etcd = ",".join(self._at(one) for one in ETCDS)
        given = ("--etcd", etcd, "--member-lease-s", f"{LEASE_S:g}", *options)
        log = self._folder / f"{name}.log"
        return BrokerLife(self._namespace(name), self._at(name), log, {}, given, name)

    def _etcd(self, name: str) -> ProgramLife:
        peers = {one: f"http://{self._host(one)}:{self._peer_ports[one]}" for one in ETCDS}
        client = f"http://{self._at(name)}"
        command = (
            f"{etcd_program()}",
            *("--name", name, "--data-dir", f"{self._folder / name}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers[name], "--initial-advertise-peer-urls", peers[name]),
            *("--initial-cluster", ",".join(f"{one}={url}" for one, url in peers.items())),
            *("--initial-cluster-state", "new", *TIMERS),
        )
        # Of some processors it says that it was never tried on them.
        machine = os.uname().machine
        environment = {} if machine == "x86_64" else {"ETCD_UNSUPPORTED_ARCH": machine}
        log = self._folder / f"{name}.log"
        return ProgramLife(name, self._namespace(name), log, environment, command)
