"""Two hosts on one machine: network namespaces of P and of D, both of which reach this process."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from chaos_harness.hosts import Hosts

SIDES = ("p", "d")


@dataclass(frozen=True)
class TwoHosts:
    """How processes of P and of D are started, and where they find a server of this process."""

    address: str
    commands: tuple[list[str], list[str]]
    """What stands before the command of a process of P, and of D."""


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """P's and D's host, with one wire between them.

    Raises `OSError` without the right to make any.
    """
    with Hosts([SIDES]) as hosts:
        names = [hosts.namespace(side) for side in SIDES]
        for number, (side, name) in enumerate(zip(SIDES, names, strict=True)):
            here, there = f"10.214.{number}.1", f"10.214.{number}.2"
            device = f"{name}0"[-15:]
            _ip(f"link add {device} type veth peer name up{side} netns {name}")
            _ip(f"addr add {here}/24 dev {device}", f"link set {device} up")
            _ip(f"-n {name} addr add {there}/24 dev up{side}", f"-n {name} link set up{side} up")
            if number:
                _ip(f"-n {name} route add 10.214.0.1/32 via {here}")
        commands = [
            [
                *("ip", "netns", "exec", name),
                *("env", f"UCX_NET_DEVICES={hosts.device(side, other)}"),
            ]
            for name, side, other in zip(names, SIDES, SIDES[::-1], strict=True)
        ]
        yield TwoHosts("10.214.0.1", (commands[0], commands[1]))


def _ip(*commands: str) -> None:
    for command in commands:
        words = ["ip", *command.split()]
        subprocess.run(words, check=True)
