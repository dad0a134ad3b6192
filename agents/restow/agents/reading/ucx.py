"""What UCX may use on this host, and whether the network interfaces that it found are gone.

UCX's TCP binds to interfaces by name when a worker is made, and knows only the routes of interfaces
that existed when the process first asked (UCX 1.23). If a container is disconnected from its
network and connected again, it gets another interface. Then no read over the old worker ends any
more, a peer that connects to it may crash the process, and a new worker finds no route. Only a new
process helps, and UCX reports nothing, so a process that is read from checks by itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from restow.agents.memory.errors import TransportFailedError


def ucx_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the environment's settings that may keep UCX from starting, to append to its error.

    >>> ucx_settings({"UCX_TLS": "tpc"})
    "; check these environment variables: UCX_TLS='tpc'"
    """
    names = [name for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in environment]
    settings = ", ".join(f"{name}={environment[name]!r}" for name in names)
    return settings and f"; check these environment variables: {settings}"


def allows_tcp(tls: str | None) -> bool:
    """Return whether UCX may use TCP.

    >>> [allows_tcp(tls) for tls in (None, "all", "tcp,self", "^cuda_ipc,cma")]
    [True, True, True, True]
    >>> [allows_tcp(tls) for tls in ("^tcp", "^all", "sm", "rc,cuda")]
    [False, False, False, False]
    """
    return _allows(tls, {"all", "tcp"})


def allows_process_reads(tls: str | None) -> bool:
    """Return whether UCX may read other processes' memory on the host, by `process_vm_readv`.

    >>> [allows_process_reads(tls) for tls in (None, "all", "cma,self", "^tcp", "rc,sm")]
    [True, True, True, True, True]
    >>> [allows_process_reads(tls) for tls in ("tcp,self", "^cma", "^sm,tcp", "posix")]
    [False, False, False, False]
    """
    return _allows(tls, {"all", "cma", "sm", "shm"})


def _allows(tls: str | None, transports: set[str]) -> bool:
    """Evaluate a list of allowed names, or after ``^`` of excluded names; empty allows all."""
    if not tls:
        return True
    names = {name.split(":")[0].strip() for name in tls.removeprefix("^").split(",")}
    return names.isdisjoint(transports) == tls.startswith("^")


LOOK_S = 1.0
SIOCGIFADDR = 0x8915
_NAME_BYTES = 40
"""Size of `struct ifreq`."""
_NAME_CHARACTERS = 15
_IPV6 = Path("/proc/net/if_inet6")
_DEVICES = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Interfaces with an address that are not bridges, and their numbers, at one moment."""

    numbers: Mapping[str, int]

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Interfaces:
        """Return the interfaces that UCX may bind to now; none if it must not use TCP."""
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
        """Whether every interface is gone or has been replaced by another of the same name.

        While any interface remains, UCX may still read over it: UCX does not tell which it uses.
        """
        if not self.numbers:
            return False
        return all(_number(name) != number for name, number in self.numbers.items())


class InterfaceWatch:
    """Checks from time to time whether the interfaces still exist."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Note the interfaces with which a transport is being set up."""
        self._clock = clock
        self._interfaces = Interfaces.found()
        self._look_s = 0.0

    def check(self) -> None:
        """Check, at most once in `LOOK_S`. Raises `TransportFailedError` if they are gone."""
        now_s = self._clock()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            if self._interfaces.are_gone:
                names = ", ".join(self._interfaces.numbers)
                raise TransportFailedError(
                    f"the network interfaces that memory was read over are gone ({names}), and UCX "
                    f"does not use new interfaces: restart this process"
                )


def _number(name: str) -> int | None:
    # Listing all interfaces is slower, and a tick of a few microseconds must not look like work.
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


_UCP = re.compile(r"(/\S*/libucp[^/\s]*)$", re.MULTILINE)


def loaded_ucx(maps: str) -> list[str]:
    """Return the path of every libucp in a process's memory map.

    >>> loaded_ucx('''7f1-7f2 r-xp 0000 00:1b 77   /a/nixl.libs/libucp-1c.so.0
    ... 7f2-7f3 r--p 0000 00:1b 77   /a/nixl.libs/libucp-1c.so.0
    ... 7f3-7f4 r--p 0000 00:1b 78   /usr/lib/libm.so.6''')
    ['/a/nixl.libs/libucp-1c.so.0']
    """
    return sorted(set(_UCP.findall(maps)))
