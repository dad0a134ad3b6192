"""What this host lets processes have, as far as agents and brokers need it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from restow.broker.client.connection.proxies import way_note
from restow.broker.doctor.finding import Finding, bad, ok, warn
from restow.broker.doctor.process_reading import look_at_process_reading
from restow.broker.draw.bytes_and_seconds import size_text

FEW_FILES, MANY_FILES = 1024, 4096
"""UCX opens sockets and event descriptors for each peer and transport."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Containers have 64 MiB unless they are given more."""


def look_at_host() -> Iterator[Finding]:
    """All of it."""
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield shared_memory(_free_bytes(SHARED_MEMORY))
    yield look_at_process_reading()
    yield from way_to_the_broker(way_note())


def files(limits: tuple[int, int]) -> Finding:
    """Soft and hard limit of open files."""
    soft, hard = limits
    words = f"{_limit(soft)} may be open"
    if soft != resource.RLIM_INFINITY and soft < MANY_FILES:
        step = f"`ulimit -n {hard if hard >= MANY_FILES else 65536}`, or LimitNOFILE= of the unit"
        return (bad if soft < FEW_FILES else warn)("open files", words, step)
    return ok("open files", words)


def locked_memory(soft: int) -> Finding:
    """Bytes that may be locked."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    return warn(
        "locked memory",
        f"{size_text(soft)}: RDMA registers pages no further than that",
        "`ulimit -l unlimited`, or LimitMEMLOCK=infinity; without RDMA it does not matter",
    )


def shared_memory(free_bytes: int | None) -> Finding:
    """Bytes free where processes of one engine share regions."""
    if free_bytes is None:
        return bad("shared memory", f"there is no {SHARED_MEMORY}", "mount a tmpfs there")
    words = f"{size_text(free_bytes)} free in {SHARED_MEMORY}"
    if free_bytes < SMALL_SHARED_MEMORY_BYTES:
        return warn(
            "shared memory",
            words,
            "regions of CPU engines lie there: in a container, --shm-size, or a Memory emptyDir",
        )
    return ok("shared memory", words)


def way_to_the_broker(note: str) -> Iterator[Finding]:
    """Given what `way_note` says: nothing, where nobody would think otherwise."""
    if note:
        yield ok("way to the broker", note)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return None
    return found.f_bavail * found.f_frsize
