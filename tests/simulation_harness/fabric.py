"""What NIXL does, with real bytes: reads take their time, and do not end when they are told to.

As PLATFORM facts have it: a read of pages that were reused ends well; a read of a paused peer does
not end; a handle that was released may still write; only the end of the reader's NIXL agent stops
its writing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from restow.agents.memory.errors import PeerLostError, ReadFailedError
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading.lane import Known, Read
from simulation_harness.network import Network
from simulation_harness.virtual_loop import CURRENT, Process

STEPS = 3
"""In which the bytes of a read arrive."""
PAUSED_S = 0.01


class Fabric:
    """All NIXL agents."""

    def __init__(self, network: Network, rng: Random) -> None:
        self.network, self.rng = network, rng
        self.names: dict[str, SimulatedTransport] = {}
        self.names_are_unique = True
        self.spoiled = 0.0
        """Of pieces, how many arrive with a byte changed."""
        self.longest_s = 0.0
        """What the slowest read took of its own."""
        self._opened: dict[Process, int] = {}

    def token(self, process: Process) -> str:
        """Return the part of a name that tells one life of a process from the others."""
        if self.names_are_unique:
            return f"{self.rng.getrandbits(48):012x}"
        self._opened[process] = number = self._opened.get(process, 0) + 1
        return f"{number}"

    def transport(self, label: str) -> Any:
        """Return what replaces `NixlTransport`."""
        return SimulatedTransport(self, label)


@dataclass(eq=False)
class Flight:
    peer: str
    source: SimulatedTransport
    pieces: list[tuple[int, int, int]]
    done: bool = False
    error: Exception | None = None
    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)
    took_s: float = 0.0


class SimulatedTransport:
    """`restow.agents.reading.nixl_transport.NixlTransport`, by its verbs."""

    kind = "nixl"

    def __init__(self, fabric: Fabric, label: str) -> None:
        process = CURRENT.get()
        if process is None:
            raise RuntimeError("a transport outside of a process")
        self._fabric, self._process = fabric, process
        self.name = f"{label}-{fabric.token(process)}"
        self._ranges: list[range] = []
        self._peers: set[str] = set()
        self._closed = False
        fabric.names[self.name] = self

    @property
    def process(self) -> Process:
        return self._process

    def register(self, address: int, length_bytes: int, place: MemoryPlace) -> None:
        self._ranges.append(range(address, address + length_bytes))

    def holds(self, address: int, length_bytes: int) -> bool:
        """Return whether one registration holds all of these bytes."""
        return any(address in one and address + length_bytes <= one.stop for one in self._ranges)

    def metadata(self) -> bytes:
        return self.name.encode()

    def knows(self, peer: str) -> bool:
        return peer in self._peers

    def prepare(self, peer: str, known: Known) -> None:
        if known.metadata.decode() != peer:
            raise PeerLostError(f"the metadata of agent {peer} is of another agent", agent=peer)
        self._peers.add(peer)

    def takes(self, read: Read) -> bool:
        return True

    def forget(self, peer: str) -> None:
        self._peers.discard(peer)

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        peer, descriptors = read.peer, read.descriptors
        if peer not in self._peers:
            raise ReadFailedError(f"agent {peer} was not added", agent=peer)
        columns = (descriptors.src_address, descriptors.dst_address, descriptors.length_bytes)
        pieces = list(zip(*(column.tolist() for column in columns), strict=True))
        source = self._fabric.names[peer]
        for src_address, dst_address, length in pieces:
            if not (source.holds(src_address, length) and self.holds(dst_address, length)):
                raise ReadFailedError("a piece outside of what is registered", agent=peer)
        flight = Flight(peer, source, pieces)
        size = max(1, -(-len(pieces) // STEPS))
        flight.steps = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        self._step(flight)
        return flight

    def poll(self, flight: Flight) -> bool:
        if flight.error is not None:
            raise flight.error
        return flight.done

    def release(self, flight: Flight) -> None:
        """Stop nothing: a read that was released may still write."""

    def progress(self) -> None:
        """Do nothing: connections make themselves."""

    def close(self) -> None:
        self._closed = True

    def _step(self, flight: Flight) -> None:
        """Move the next part of a read, in the process of the reader."""
        if self._closed:
            return
        network = self._fabric.network
        source, here = flight.source.process, self._process
        apart = network.is_cut(source.host, here.host)
        if not source.alive or apart:
            # A host that is gone or cut off keeps silent until keepalive gives up.
            wait_s = 5.0 if apart else self._fabric.rng.uniform(0.0, 0.05)
            here.later(wait_s, self._fail, flight)
        elif source.paused:
            here.later(PAUSED_S, self._step, flight)
        elif flight.steps:
            network.count()
            for src_address, dst_address, length in flight.steps.pop(0):
                ctypes.memmove(dst_address, src_address, length)
                self._spoil(dst_address, length)
            pause_s = self._pause_s()
            flight.took_s += pause_s
            self._fabric.longest_s = max(self._fabric.longest_s, flight.took_s)
            here.later(pause_s, self._step, flight)
        else:
            flight.done = True

    def _spoil(self, address: int, length: int) -> None:
        fabric = self._fabric
        if fabric.spoiled and fabric.rng.random() < fabric.spoiled:
            byte = ctypes.c_ubyte.from_address(address + fabric.rng.randrange(length))
            byte.value ^= 1 << fabric.rng.randrange(8)

    def _fail(self, flight: Flight) -> None:
        flight.error = PeerLostError(f"agent {flight.peer} went away", agent=flight.peer)

    def _pause_s(self) -> float:
        rng = self._fabric.rng
        return rng.uniform(0.0001, 0.01) if rng.random() < 0.9 else rng.uniform(0.01, 6.0)
