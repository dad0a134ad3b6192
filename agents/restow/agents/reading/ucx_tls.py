"""The transports that the environment lets UCX use (``UCX_TLS``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")


def ucx_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return the environment's settings that may keep UCX from starting, to append to its error.

    >>> ucx_settings({"UCX_TLS": "tpc"})
    "; check these environment variables: UCX_TLS='tpc'"
    """
    said = [f"{name}={environment[name]!r}" for name in ("UCX_TLS",) if name in environment]
    if "UCX_NET_DEVICES" in environment:
        devices = [name for _, name in socket.if_nameindex()]
        with suppress(OSError):
            devices += sorted(device.name for device in _RDMA.iterdir())
        given = environment["UCX_NET_DEVICES"]
        said.append(f"UCX_NET_DEVICES={given!r} (this host has {', '.join(devices)})")
    if not said:
        return ""
    return f"; check these environment variables: {', '.join(said)}"


def allows_tcp(tls: str | None) -> bool:
    """Return whether UCX may use TCP.

    >>> [allows_tcp(tls) for tls in (None, "all", "tcp,self", "^tcp", "^all", "sm")]
    [True, True, True, False, False, False]
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


def _allows(tls: str | None, one_of: set[str]) -> bool:
    """Evaluate a list of allowed names, or after ``^`` of excluded names; empty allows all."""
    if not tls:
        return True
    names = {name.split(":")[0].strip() for name in tls.removeprefix("^").split(",")}
    return names.isdisjoint(one_of) == tls.startswith("^")
