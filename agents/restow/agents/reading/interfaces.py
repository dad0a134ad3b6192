"""The network interfaces that UCX found when it was set up, and whether all of them are gone.

UCX's TCP binds to interfaces by name when a worker is made, and knows the routes of those that were
there when the process first asked (UCX 1.23). When a container is cut off its network and connected
again, its interface is another one: no read over the old worker ends any more, a peer that connects
to it may bring the process down, and a new worker finds no route. Nothing but a new process helps,
and nothing says so: whoever is read from looks by itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from restow.agents.memory.errors import TransportFailedError
from restow.agents.reading.ucx_tls import allows_tcp

LOOK_S = 1.0
SIOCGIFADDR = 0x8915
_NAME_BYTES = 40
"""Of `struct ifreq`."""
_NAME_CHARACTERS = 15
_IPV6 = Path("/proc/net/if_inet6")
_DEVICES = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Those with an address that are no bridges, and their numbers, at one moment."""

    numbers: Mapping[str, int]

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Interfaces:
        """Those that UCX may bind to now; none where it is told to use no TCP."""
        if not allows_tcp(environment.get("UCX_TLS")):
            return cls({})
        wanted = environment.get("UCX_NET_DEVICES", "all").split(",")
        return cls(
            {
                name: number
                for number, name in socket.if_nameindex()
                if ("all" in wanted or name in wanted) and _is_usable(name)
            }
        )

    @property
    def are_gone(self) -> bool:
        """Whether none of them is there any more, or each is another one by now.

        While one is left, so may be what UCX reads over: it tells nobody which one that is.
        """
        if not self.numbers:
            return False
        return all(_number(name) != number for name, number in self.numbers.items())


class InterfaceWatch:
    """Looks after them, now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Those that a transport is set up with now."""
        self._clock = clock
        self._found = Interfaces.found()
        self._look_s = 0.0

    def check(self) -> None:
        """Look, once in `LOOK_S`. Raises `TransportFailedError` if they are gone."""
        now_s = self._clock()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            if self._found.are_gone:
                names = ", ".join(self._found.numbers)
                raise TransportFailedError(
                    f"the network interface that memory was read over is gone ({names}), and UCX "
                    f"takes no other one: start this process again"
                )


def _number(name: str) -> int | None:
    # Quicker than a list of all: a tick of a few microseconds must not look like one with work.
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return None


def _is_usable(name: str) -> bool:
    is_bridge = (_DEVICES / name / "bridge").exists()
    return name != "lo" and not is_bridge and _has_address(name)


def _has_address(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack(f"{_NAME_BYTES}s", name.encode()[:_NAME_CHARACTERS])
        try:
            fcntl.ioctl(any_socket, SIOCGIFADDR, request)
        except OSError:
            return _has_ipv6_address(name)
        return True


def _has_ipv6_address(name: str) -> bool:
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[-1] == name for line in lines)
