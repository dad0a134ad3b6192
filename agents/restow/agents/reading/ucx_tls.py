"""Which transports UCX may use, as the environment says (``UCX_TLS``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")


def ucx_settings(environment: Mapping[str, str] = os.environ) -> str:
    """What of the environment may keep UCX from starting, to be said behind its error.

    >>> ucx_settings({"UCX_TLS": "tpc"})
    "; see whether it is right what the environment says: UCX_TLS='tpc'"
    """
    said = [f"{name}={environment[name]!r}" for name in ("UCX_TLS",) if name in environment]
    if "UCX_NET_DEVICES" in environment:
        devices = [name for _, name in socket.if_nameindex()]
        with suppress(OSError):
            devices += sorted(one.name for one in _RDMA.iterdir())
        given = environment["UCX_NET_DEVICES"]
        said.append(f"UCX_NET_DEVICES={given!r} (here are {', '.join(devices)})")
    if not said:
        return ""
    return f"; see whether it is right what the environment says: {', '.join(said)}"


def allows_tcp(tls: str | None) -> bool:
    """Whether UCX may use TCP.

    >>> [allows_tcp(tls) for tls in (None, "all", "tcp,self", "^tcp", "^all", "sm")]
    [True, True, True, False, False, False]
    """
    return _allows(tls, {"all", "tcp"})


def allows_process_reads(tls: str | None) -> bool:
    """Whether UCX may read other processes' memory on one host, by `process_vm_readv`.

    >>> [allows_process_reads(tls) for tls in (None, "all", "cma,self", "^tcp", "rc,sm")]
    [True, True, True, True, True]
    >>> [allows_process_reads(tls) for tls in ("tcp,self", "^cma", "^sm,tcp", "posix")]
    [False, False, False, False]
    """
    return _allows(tls, {"all", "cma", "sm", "shm"})


def _allows(tls: str | None, one_of: set[str]) -> bool:
    """A list of what is used, or with ``^`` of what is left out; nothing: all are used."""
    if not tls:
        return True
    names = {name.split(":")[0].strip() for name in tls.removeprefix("^").split(",")}
    return names.isdisjoint(one_of) == tls.startswith("^")
