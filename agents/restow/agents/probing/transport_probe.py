"""A program that reads a peer's memory once, while UCX logs how it reads.

UCX names the transport of a read only in its log and only at its first choice: it never tells NIXL,
and never logs it again in a process that has read already. The read to make comes as a line of JSON
on stdin, followed by the peer's metadata. UCX's log goes to stdout; an error follows as a line of
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import AgentError, ReadDeadlineError
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


def read_once(wanted: OneRead, metadata: bytes) -> None:
    """Do the read. Raises what `NixlTransport` raises, and `ReadDeadlineError`."""
    from restow.agents.reading.nixl_transport import NixlTransport
    from restow.agents.reading.transport import Known, Read

    until_s = time.monotonic() + wanted.within_s
    transport, room = NixlTransport("examiner"), Staging(wanted.dst, wanted.size_bytes)
    with closing(transport):
        transport.register(room.address, wanted.size_bytes, wanted.dst)
        transport.prepare(wanted.peer, Known(metadata))
        rows: list[Any] = [
            np.array([value], np.int64)
            for value in (wanted.address, room.address, wanted.size_bytes)
        ]
        read = Read(wanted.peer, Descriptors(*rows), wanted.src, wanted.dst)
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
