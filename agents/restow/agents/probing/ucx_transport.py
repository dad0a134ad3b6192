"""Find the transport over which UCX reads a peer, by reading once in another process.

UCX names the transport of a read only in its log and only at its first choice: it never tells NIXL,
and never logs it again in a process that has read already. So this module is also the program that
reads once. The read to make comes as a line of JSON on stdin, followed by the peer's metadata.
UCX's log goes to stdout; an error follows as a line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import NamedTuple

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import AgentError, ReadDeadlineError, ReadFailedError
from restow.agents.memory.regions import MemoryKind, MemoryPlace
from restow.agents.memory.staging import Staging

POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class OneRead:
    """A read of ``size_bytes`` at the peer's ``address``, to end within ``within_s``."""

    peer: str
    address: int
    size_bytes: int
    src: MemoryPlace
    dst: MemoryPlace
    within_s: float

    def as_line(self) -> bytes:
        """Return the line for stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> OneRead:
        """Parse the line from stdin, which this rank's agent wrote, not a peer."""
        value = json.loads(line)
        for side in ("src", "dst"):
            place = value[side]
            value[side] = MemoryPlace(MemoryKind(place["kind"]), place["device_id"])
        return cls(**value)


START_S = 30.0
"""Time for a process to import NIXL on a busy machine."""
_ROW = re.compile(r"\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|\s*$")
_READS = "remote memory read by ucp_get"
_TITLE = re.compile(r"\| (?P<own>\S+ self )?.*cfg#\d+")


class TransportName(NamedTuple):
    """The way in which UCX reads a peer, from its log."""

    transport: str
    """Transport and device, as ``cma/memory`` or ``rc_mlx5/mlx5_0:1``."""
    method: str
    """Method, as ``zero-copy`` or ``software emulation``."""


def find_transport(read: OneRead, metadata: bytes) -> TransportName:
    """Read once and return how; blocks.

    Raises what the read raises, and `ReadFailedError` if UCX does not log its transport.
    """
    environment = {**os.environ, "UCX_PROTO_INFO": "y"}
    environment.pop("UCX_LOG_FILE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "restow.agents.probing.ucx_transport"],
            input=read.as_line() + metadata,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=START_S + read.within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReadFailedError(f"the read from agent {read.peer} did not end in time") from None
    log = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ReadFailedError(_why(log, read.peer, done.returncode))
    transport = transport_in(log)
    if transport is None:
        raise ReadFailedError(f"UCX did not log how it read from agent {read.peer}")
    return transport


def transport_in(log: str) -> TransportName | None:
    """Return the last transport that a log of UCX_PROTO_INFO has for long reads of other processes.

    >>> transport_in('''
    ... | examiner intra-node cfg#1                               |
    ... | remote memory read by ucp_get*(multi) into host memory  |
    ... +--------+--------------------+---------------------------+
    ... | Range  |    Description     |          Config           |
    ... +--------+--------------------+---------------------------+
    ... | 0..256 | short              | tcp/lo                    |
    ... | 257..inf | software emulation | tcp/eth0                |
    ... +--------+--------------------+---------------------------+
    ... | examiner self cfg#0                                     |
    ... | remote memory read by ucp_get*(multi) into host memory  |
    ... +--------+--------------------+---------------------------+
    ... | 0..inf | zero-copy          | cma/memory                |
    ... +--------+--------------------+---------------------------+
    ... ''')
    TransportName(transport='tcp/eth0', method='software emulation')
    """
    last, other, reads = None, False, False
    for line in log.splitlines():
        title = _TITLE.search(line)
        if title is not None:
            other, reads = title["own"] is None, False
        elif "|" in line and _READS in line:
            reads = other
        elif reads and (row := _ROW.search(line)) and row[1].endswith("..inf"):
            last, reads = TransportName(row[3], row[2]), False
    return last


def _why(log: str, peer: str, status: int) -> str:
    """Return the process's last words, or its exit status."""
    try:
        reason, words = json.loads(log.splitlines()[-1])
    except (IndexError, ValueError):
        return f"the process that was to read from agent {peer} ended with status {status}"
    return f"{reason}: {words}"


def read_once(wanted: OneRead, metadata: bytes) -> None:
    """Do the read. Raises what `NixlTransport` raises, and `ReadDeadlineError`."""
    from restow.agents.reading.lane import Known, Read
    from restow.agents.reading.nixl_transport import NixlTransport

    until_s = time.monotonic() + wanted.within_s
    transport, room = NixlTransport("examiner"), Staging(wanted.dst, wanted.size_bytes)
    with closing(transport):
        transport.register(room.address, wanted.size_bytes, wanted.dst)
        transport.prepare(wanted.peer, Known(metadata))
        piece = Descriptors.single(wanted.address, room.address, wanted.size_bytes)
        read = Read(wanted.peer, piece, wanted.src, wanted.dst)
        flight = transport.post(read, lambda: None)
        while not transport.poll(flight):
            if time.monotonic() > until_s:
                raise ReadDeadlineError(
                    f"the read from agent {wanted.peer} did not end within {wanted.within_s:g} s"
                )
            time.sleep(POLL_S)
        transport.release(flight)


def main() -> int:
    """Do the read that stdin describes; return 1 if it failed."""
    read = OneRead.of_line(sys.stdin.buffer.readline())
    try:
        read_once(read, sys.stdin.buffer.read())
    except AgentError as error:
        sys.stdout.write("\n" + json.dumps([error.reason, error.message]) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
