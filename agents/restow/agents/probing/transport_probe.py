"""Read a peer's memory once, in a process of its own that UCX tells how it reads.

UCX says over what it reads only in its log, and only as it chooses: never to NIXL, and never again
in a process that has read already. Run as a program: how to read comes as a line of JSON on stdin,
then the peer's metadata; UCX's words and, last, an error as a line of JSON go to stdout.
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
    """What is read: so many bytes at ``address`` of the peer, within ``within_s``."""

    peer: str
    address: int
    size_bytes: int
    src: MemoryPlace
    dst: MemoryPlace
    within_s: float

    def as_line(self) -> bytes:
        """For stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> OneRead:
        """From stdin; the line is of the own agent, not of a peer."""
        value = json.loads(line)
        for side in ("src", "dst"):
            place = value[side]
            value[side] = MemoryPlace(MemoryKind(place["kind"]), place["device_id"])
        return cls(**value)


def read_once(one: OneRead, metadata: bytes) -> None:
    """Read it. Raises what `NixlTransport` raises, and `ReadDeadlineError`."""
    from restow.agents.reading.nixl_transport import NixlTransport
    from restow.agents.reading.transport import Known, Read

    until_s = time.monotonic() + one.within_s
    transport, room = NixlTransport("examiner"), Staging(one.dst, one.size_bytes)
    with closing(transport):
        transport.register(room.address, one.size_bytes, one.dst)
        transport.prepare(one.peer, Known(metadata))
        rows: list[Any] = [
            np.array([value], np.int64) for value in (one.address, room.address, one.size_bytes)
        ]
        read = Read(one.peer, Descriptors(*rows), one.src, one.dst)
        flight = transport.post(read, lambda: None)
        while not transport.poll(flight):
            if time.monotonic() > until_s:
                raise ReadDeadlineError(
                    f"no byte of agent {one.peer} came within {one.within_s:g} s"
                )
            time.sleep(POLL_S)
        transport.release(flight)


def main() -> int:
    """Read what stdin says. Exits with 1 if that failed."""
    one = OneRead.of_line(sys.stdin.buffer.readline())
    try:
        read_once(one, sys.stdin.buffer.read())
    except AgentError as error:
        sys.stdout.write("\n" + json.dumps([error.reason, error.message]) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
