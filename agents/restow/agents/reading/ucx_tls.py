"""Which transports UCX may use, as the environment says (``UCX_TLS``)."""

from __future__ import annotations


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
