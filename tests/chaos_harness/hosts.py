"""Hosts on one machine: network namespaces that can be cut off from each other without a word.

Two hosts that speak to each other have a wire of their own, through a switch. A wire that is cut
swallows what is sent: as with a real switch that fails, no interface goes down and no connection is
reset.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
_FORWARDING, _DISABLED = 3, 0


def why_not() -> str:
    """Return why there can be no hosts on this machine, or an empty text if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "bridge"):
        if shutil.which(command) is None:
            return f"the command {command!r} (iproute2) is missing"
    name = f"restow{os.getpid()}"
    try:
        _ip(f"netns add {name}", f"netns del {name}")
    except OSError as error:
        return str(error)
    return ""


def enter(namespace: str) -> None:
    """Move this process to a host; with an empty name it stays. Raises `OSError`.

    Call this before the process has threads. It then sees the host's devices under ``/sys``, where
    UCX looks for them.
    """
    if not namespace:
        return
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        # Python has setns and unshare from 3.12 on, and mount never.
        _call("setns", fd, CLONE_NEWNET)
    finally:
        os.close(fd)
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    _call("umount2", b"/sys", MNT_DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


class Hosts:
    """Hosts and the ``wires`` between them. The calling process is on none of them."""

    def __init__(self, wires: Sequence[tuple[str, str]]) -> None:
        self._prefix = f"rw{os.getpid():x}"
        self._wires = {pair: number for number, pair in enumerate(wires)}
        self._names = sorted({host for pair in wires for host in pair})

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def device(self, of: str, towards: str) -> str:
        """Return the interface of a host that leads to another host."""
        return f"{self._prefix}{of[:2]}{towards[:2]}"

    def primary(self, of: str) -> str:
        """Return the address at which all hosts with a wire to a host reach it."""
        return f"10.214.0.{1 + self._names.index(of)}"

    def address(self, of: str, seen_from: str) -> str:
        """Return a host's address as another host sees it."""
        pair = self._pair(of, seen_from)
        return f"10.213.{self._wires[pair]}.{1 + pair.index(of)}"

    def __enter__(self) -> Hosts:
        self._remove()
        switch = f"{self._prefix}-switch"
        commands = [f"netns add {switch}"]
        for host in self._names:
            namespace = self.namespace(host)
            commands += [f"netns add {namespace}", f"-n {namespace} link set lo up"]
            commands += [f"-n {namespace} addr add {self.primary(host)}/32 dev lo"]
        for pair, number in self._wires.items():
            commands += [f"-n {switch} link add br{number} type bridge"]
            commands += [f"-n {switch} link set br{number} up"]
            for one, other in (pair, pair[::-1]):
                commands += self._plug(one, other)
        for pair in self._wires:
            for one, other in (pair, pair[::-1]):
                commands += self._route(one, other)
        _ip(*commands)
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def cut(self, one: str, other: str) -> None:
        """Drop what two hosts send each other."""
        self._set_ports(one, other, _DISABLED)

    def heal(self, one: str, other: str) -> None:
        """Carry again what two hosts send each other."""
        self._set_ports(one, other, _FORWARDING)

    def replace(self, one: str, other: str) -> None:
        """Remove the interface of one host to another, and add a new interface of the same name."""
        namespace, device = self.namespace(one), self.device(one, other)
        _ip(f"-n {namespace} link del {device}", *self._plug(one, other))

    def _pair(self, one: str, other: str) -> tuple[str, str]:
        return (one, other) if (one, other) in self._wires else (other, one)

    def _plug(self, one: str, other: str) -> list[str]:
        """Return the commands that give a host its end of a wire."""
        switch, number = f"{self._prefix}-switch", self._wires[self._pair(one, other)]
        device, namespace = self.device(one, other), self.namespace(one)
        return [
            f"-n {switch} link add {device}s type veth peer name {device} netns {namespace}",
            f"-n {namespace} addr add {self.address(one, other)}/24 dev {device}",
            f"-n {namespace} link set {device} up",
            f"-n {switch} link set {device}s master br{number}",
            f"-n {switch} link set {device}s up",
        ]

    def _route(self, one: str, other: str) -> list[str]:
        """Return the command by which a host finds the other host's primary address."""
        to, gateway, source = self.primary(other), self.address(other, one), self.primary(one)
        return [f"-n {self.namespace(one)} route add {to}/32 via {gateway} src {source}"]

    def _set_ports(self, one: str, other: str, state: int) -> None:
        for of, towards in ((one, other), (other, one)):
            port = f"{self.device(of, towards)}s"
            _run("bridge", "-n", f"{self._prefix}-switch", "link", "set", "dev", port,
                 "state", str(state))  # fmt: skip

    def _remove(self) -> None:
        """Delete this process's namespaces, and those that ended processes left."""
        for namespace in Path("/run/netns").glob("rw*-*"):
            prefix = namespace.name.split("-")[0]
            is_left = not Path(f"/proc/{int(prefix[2:], 16)}").exists()
            if is_left or prefix == self._prefix:
                _ip(f"netns del {namespace.name}")


def _ip(*commands: str) -> None:
    for command in commands:
        _run("ip", *command.split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
