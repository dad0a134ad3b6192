"""An agent as it is, with real memory and a broker that says anything; NIXL alone is made up.

Every copy, product and read is looked at before it is made: it must lie inside the rank's regions
or its staging.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from agent_harness.handover import KINDS, part
from agent_harness.world import Case, RankMemory, make_case
from fuzzing.door import Violation
from restow.agents.binding.copies import Copies
from restow.agents.binding.extents import Extents
from restow.agents.copying import copier as copying
from restow.agents.copying.copier import DIGEST_BYTES, Hasher
from restow.agents.execute.orders import region_to_proto
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import PeerLostError
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading import nixl_transport
from restow.agents.reading.lane import Flight, Known, Read
from restow.broker.layout.rows import Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.rpc import wire, wire_program
from restow.kernels.tables import FLOAT_BYTES, ProjectColumn
from restow.v1 import agent_link_pb2 as pb
from simulation_harness.virtual_loop import VirtualLoop

STAGING_BYTES = 4 << 20
PROGRAMS = (
    ("wide", Strategy.SLICES),
    ("wide", Strategy.WHOLE),
    ("wide", Strategy.PACK),
    ("wide", Strategy.INTERLEAVE),
    ("cast", Strategy.WHOLE),
    ("cast", Strategy.PACK),
    ("cast", Strategy.INTERLEAVE),
    ("recompute", Strategy.RECOMPUTE),
)
PEER_ADDRESS = 1 << 40
HANDOFF = 77

case = cache(make_case)


@cache
def program_of(name: str, strategy: Strategy, dst_rank: int) -> Program:
    plan = make_plan(case(name).source, case(name).destination)
    made = compile_programs(plan, strategy)
    return next(one for one in made if one.dst_rank == dst_rank)


class Fence:
    """Where bytes may be written, and where they may be read."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.found: list[str] = []
        """What was about to happen elsewhere."""

    def holds(self, begin: Int64s, size: Int64s, what: str) -> None:
        """Check that all of these ranges lie inside. Raises `Violation`."""
        begin, size = np.broadcast_arrays(np.asarray(begin), np.asarray(size))
        inside = np.zeros(begin.shape, bool)
        for start, stop in self.ranges:
            inside |= (begin >= start) & (size > 0) & (size <= stop - begin) & (begin < stop)
        if not inside.all():
            index = int(np.argmin(inside.ravel()))
            self.found.append(f"{what}: {size.ravel()[index]} bytes at {begin.ravel()[index]}")
            raise Violation(self.found[-1])

    def check_copies(self, copies: Copies, reads: bool) -> None:
        for one in copies.grids:
            for side, address, step, dtype in (
                ("copied to", one.dst_address, one.dst_step_bytes, one.dst_dtype),
                ("copied from", one.src_address, one.src_step_bytes, one.src_dtype),
            ):
                if side == "copied to" or reads:
                    reach = (one.count.astype(object) - 1) * step + ITEM_BYTES[dtype]
                    if address.size and (np.asarray(reach) > 1 << 40).any():
                        raise Violation(f"{side}: a row of {np.max(reach)} bytes")
                    self.holds(address, np.asarray(reach, np.int64), side)

    def check_products(self, rows: Int64s) -> None:
        item = FLOAT_BYTES[rows[:, ProjectColumn.TYPE]]
        dst_item = FLOAT_BYTES[rows[:, ProjectColumn.DST_TYPE]]
        taps, hidden, channels = (
            rows[:, one] - 1
            for one in (ProjectColumn.TAPS, ProjectColumn.HIDDEN, ProjectColumn.CHANNELS)
        )
        for what, address, reach in (
            (
                "rebuilt from",
                ProjectColumn.SRC_ADDRESS,
                taps * rows[:, ProjectColumn.SRC_TAP_STRIDE_BYTES] + (hidden + 1) * item,
            ),
            (
                "multiplied with",
                ProjectColumn.WEIGHT_ADDRESS,
                channels * rows[:, ProjectColumn.WEIGHT_STRIDE_BYTES] + (hidden + 1) * item,
            ),
            (
                "rebuilt",
                ProjectColumn.DST_ADDRESS,
                channels * rows[:, ProjectColumn.DST_STRIDE_BYTES]
                + taps * rows[:, ProjectColumn.DST_TAP_STRIDE_BYTES]
                + dst_item,
            ),
        ):
            self.holds(rows[:, address], reach, what)


class CheckedTransport:
    """`restow.agents.reading.nixl_transport.NixlTransport`, by its verbs; reads nothing."""

    kind = "nixl"

    def __init__(self, fence: Fence) -> None:
        self.name = "me"
        self._fence = fence

    def register(self, address: int, length_bytes: int, place: MemoryPlace) -> None:
        self._fence.ranges.append((address, address + length_bytes))

    def metadata(self) -> bytes:
        return b"metadata"

    def prepare(self, peer: str, known: Known) -> None:
        if not known.metadata:
            raise PeerLostError(f"agent {peer} can't be connected", agent=peer)

    def takes(self, read: Read) -> bool:
        return True

    def forget(self, peer: str) -> None:
        """Do nothing: no peer is kept."""

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Check a read's ranges without moving bytes; the read has ended at once."""
        descriptors = read.descriptors
        nixl_transport._rows(descriptors.src_address, descriptors, read.src)
        nixl_transport._rows(descriptors.dst_address, descriptors, read.dst)
        self._fence.holds(descriptors.dst_address, descriptors.length_bytes, "read to")
        there, size = descriptors.src_address, descriptors.length_bytes
        if (there < 1).any() or (there > 2**63 - 1 - size).any():
            raise Violation(f"read from {there.min()}")
        return Flight(read.peer, None, True)

    def poll(self, flight: Flight) -> bool:
        return True

    def release(self, flight: Flight) -> None:
        """Do nothing: no read is kept."""

    def progress(self) -> None:
        """Do nothing: there is nothing to move on."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class AgentHouse:
    """One agent of D, or of P, and what it was told."""

    def __init__(self, of: Case, rank: int, source: bool) -> None:
        self.loop = VirtualLoop()
        self.fence = Fence()
        layout = (of.source if source else of.destination).ranks[rank]
        self.memory = RankMemory(layout, of.src_ids if source else of.dst_ids)
        self.before = self.memory.data.copy()
        self.answers: list[pb.AgentMessage] = []
        with patch(
            "restow.agents.link.transports.NixlTransport",
            lambda label: CheckedTransport(self.fence),
        ):
            self.agent = self.loop.run_until_complete(self._open(rank))
        # Weights are read, though no peer may.
        self._weights = [
            (one.base_address, one.base_address + one.length_bytes)
            for one in self.memory.regions
            if one.private
        ]

    async def _open(self, rank: int) -> AsyncAgent:
        settings = AgentSettings(
            staging_bytes=STAGING_BYTES, read_threads=1, try_metadata=False, host_reads=False
        )
        agent = AsyncAgent("nowhere:1", "E", "life", rank, self.memory.regions, settings)
        agent._link.send = self.answers.append  # type: ignore[method-assign, assignment]
        return agent

    @contextlib.contextmanager
    def lives(self) -> Iterator[AgentHouse]:
        """Run the agent until the end of the ``with``, and check all that it does."""
        run, project = copying.run_copies, copying.run_projections
        zero = copying.zero_destinations

        def run_checked(copies: Copies, device: Any) -> None:
            self.fence.check_copies(copies, reads=True)
            run(copies, device)

        def zero_checked(copies: Copies, zeroes: torch.Tensor) -> None:
            self.fence.check_copies(copies, reads=False)
            ranges = self.fence.ranges
            self.fence.ranges = [*ranges, (zeroes.data_ptr(), zeroes.data_ptr() + zeroes.numel())]
            zero(copies, zeroes)
            self.fence.ranges = ranges

        def project_checked(rows: Int64s, device: Any) -> None:
            ranges = self.fence.ranges
            self.fence.ranges = [*ranges, *self._weights]
            self.fence.check_products(rows)
            self.fence.ranges = ranges
            project(rows, device)

        digest = Hasher._digest

        def digest_checked(hasher: Hasher, extents: Extents) -> bytes:
            self.fence.holds(extents.address, extents.length_bytes, "hashed")
            return digest(hasher, extents)

        with (
            patch.object(Hasher, "_digest", digest_checked),
            patch("restow.agents.copying.copier.run_copies", run_checked),
            patch("restow.agents.copying.copier.zero_destinations", zero_checked),
            patch("restow.agents.copying.copier.run_projections", project_checked),
        ):
            try:
                yield self
            finally:
                self.loop.run_until_complete(self.agent.close())
                self.loop.close()

    def take(self, orders: Iterable[pb.AgentOrder]) -> None:
        """Take orders, and do what can be done at once."""

        async def take() -> None:
            for order in orders:
                self.agent.take(order)
            await asyncio.sleep(0.01)

        self.loop.run_until_complete(take())
        for broken in self.loop.broken:
            raise Violation(f"in the background: {broken}") from broken["exception"]
        if self.fence.found:
            raise Violation(self.fence.found[0])

    def finish_writes(self) -> None:
        """Say that the engine's own writes are done, up to any mark that an order may name."""

        async def finish() -> None:
            self.agent.writes_done(2**63 - 1)
            await asyncio.sleep(0.01)

        self.loop.run_until_complete(finish())

    def end_well(self) -> None:
        """Check that a new stream finds nothing of the old one, and only pages were written."""
        self.loop.run_until_complete(asyncio.wait_for(self.agent.hello(), 1000))
        if self.agent._tasks:
            raise Violation(f"work that does not end: {sorted(self.agent._tasks)}")
        figures = self.agent.figures
        if used := figures.gather.used_bytes + figures.scatter.used_bytes:
            raise Violation(f"{used} bytes of staging are still in use")
        if kept := self.agent._executor.gathering._held:
            raise Violation(f"what was staged or hashed is kept: {sorted(kept)}")
        touched = self.memory.data != self.before
        for one in self.memory.regions:
            if not one.private:
                begin = one.base_address - self.memory.data.ctypes.data
                touched[begin : begin + one.length_bytes] = False
        if touched.any():
            raise Violation(f"{touched.sum()} bytes outside of all pages were written")


def peers(of: Case) -> list[pb.AgentOrder]:
    """Return the orders that introduce the agents of P."""
    found = []
    for one in of.source.ranks:
        memory = RankMemory(one, of.src_ids)
        regions = [region_to_proto(region) for region in memory.regions]
        for region in regions:
            region.base_address += PEER_ADDRESS
        found.append(
            pb.AgentOrder(
                peer=pb.Peer(
                    agent_name=f"peer{one.rank}",
                    rank=one.rank,
                    nixl_metadata=b"metadata",
                    regions=regions,
                )
            )
        )
    return found


def execute(
    of: Case,
    program: Program,
    lengths: dict[int, int],
    hashed: bool = False,
) -> pb.AgentOrder:
    """Return the order to read; ``lengths`` are those of staged runs, by source rank."""
    return pb.AgentOrder(
        execute=pb.Execute(
            handoff=HANDOFF,
            handoff_id="h",
            program_id=program.program_id,
            src_blocks=wire.block_lists(of.src_ids),
            dst_blocks=wire.block_lists(of.dst_ids),
            stop_token=of.tokens,
            sources=[
                pb.Source(
                    src_rank=rank,
                    agent_name=f"peer{rank}",
                    staged_address=PEER_ADDRESS if lengths.get(rank) else 0,
                    staged_bytes=lengths.get(rank, 0),
                    digest=bytes(DIGEST_BYTES) if hashed else b"",
                )
                for rank in program.src_ranks
            ],
            grant_ms=10_000,
            digest=KINDS[hashed],
        )
    )


def stage(of: Case, program: Program, rank: int, hashed: bool = False) -> pb.AgentOrder:
    """Return the order to gather, and to hash if ``hashed``."""
    return pb.AgentOrder(
        stage=pb.Stage(
            handoff=HANDOFF,
            parts=[part(program, rank, hashed)],
            src_blocks=wire.block_lists(of.src_ids),
            stop_token=of.tokens,
            digest=KINDS[hashed],
        )
    )


def load(program: Program, rank: int | None = None) -> pb.AgentOrder:
    """Return the order that brings the program, or the part of it that source ``rank`` gathers."""
    return pb.AgentOrder(program=wire_program.program_to_proto(program, rank))
