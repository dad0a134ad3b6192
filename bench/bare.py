"""NIXL alone: the pieces of a plan, read by as many processes, with no broker, agent or Restow.

Shows how much of a handoff's time is the ground's: what descriptors cost whoever posts them.
Run as a program this is one rank's process, told in lines of JSON on stdin.
"""

from __future__ import annotations

import base64
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from touched import touched

from restow.agents.binding.pages import Blocks, RegionTable, Tokens, staged_spans
from restow.agents.binding.reads import Descriptors, Reads, SpanReads
from restow.agents.memory.regions import HOST
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.reading.transport import Known, Read
from restow.broker.layout import RankLayout
from restow.broker.planner import Plan, Program, compile_programs
from restow.broker.planner.program import GATHER_IN_ORDER, READ_PAGES, READ_SPANS, Column

BlockIds = Mapping[str, Sequence[int]]
STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class Rank:
    """One rank's process, and where its memory is."""

    to: IO[str]
    come: IO[str]
    memory: RegionTable
    staging_address: int
    name: str
    metadata: str

    def ask(self, message: object) -> None:
        self.to.write(json.dumps(message) + "\n")
        self.to.flush()

    def hear(self) -> Any:
        return json.loads(self.come.readline())


ALONE = "NIXL alone"
"""A reference: the pieces of the plan."""


class Bare:
    """The ranks of a plan, and the programs that say what they read."""

    def __init__(
        self, plan: Plan, tokens: int, sources: dict[int, Rank], readers: dict[int, Rank]
    ) -> None:
        self._programs = compile_programs(plan)
        self._tokens = Tokens(0, tokens)
        self._sources, self._readers = sources, readers
        for reader in readers.values():
            reader.ask({"peers": [(one.name, one.metadata) for one in sources.values()]})
            reader.hear()

    @property
    def complete(self) -> bool:
        """Whether all is read straight out of pages: what is gathered first can't be shown."""
        return not any(len(program.rows(GATHER_IN_ORDER)) for program in self._programs)

    def rest(self) -> None:
        """All are connected: leave the cores to others."""
        for rank in (*self._sources.values(), *self._readers.values()):
            rank.ask("rest")
            rank.hear()

    def read(self, src_ids: BlockIds, dst_ids: BlockIds) -> float:
        """Read everything once; seconds until the last rank has all its bytes."""
        src_blocks, dst_blocks = _blocks(src_ids), _blocks(dst_ids)
        for program in self._programs:
            reader = self._readers[program.dst_rank]
            reader.ask({"pieces": list(self._pieces(program, reader, src_blocks, dst_blocks))})
        for reader in self._readers.values():
            reader.hear()
        begun_s = time.perf_counter()
        for reader in self._readers.values():
            reader.ask("go")
        for reader in self._readers.values():
            reader.hear()
        return time.perf_counter() - begun_s

    def _pieces(
        self, program: Program, reader: Rank, src_blocks: Blocks, dst_blocks: Blocks
    ) -> Iterator[tuple[str, list[list[int]]]]:
        pairs, tokens, spans = program.group_pairs, self._tokens, program.rows(READ_SPANS)
        staged, _ = staged_spans(spans, pairs, tokens, reader.staging_address)
        for src_rank in program.src_ranks:
            source = self._sources[src_rank]
            rows = program.rows(READ_PAGES, src_rank)
            mine = spans[:, Column.SRC_RANK] == src_rank
            both = Descriptors.joined(
                [
                    Reads.of(rows, pairs, source.memory, reader.memory).bind(
                        src_blocks, dst_blocks, tokens
                    ),
                    SpanReads.of(spans, mine, pairs, source.memory).bind(
                        staged, src_blocks, tokens
                    ),
                ]
            )
            columns = (both.src_address, both.dst_address, both.length_bytes)
            yield source.name, [column.tolist() for column in columns]


def _blocks(ids: BlockIds) -> Blocks:
    return Blocks({group: np.array(some, np.int64) for group, some in ids.items()})


@contextmanager
def bare(plan: Plan, tokens: int, page_counts: dict[str, int]) -> Iterator[Bare]:
    """Processes for all ranks of ``plan``, each with memory of its own."""
    with ExitStack() as stack:
        sides = [
            {rank.rank: stack.enter_context(_rank(rank, page_counts)) for rank in layout.ranks}
            for layout in (plan.source, plan.destination)
        ]
        yield Bare(plan, tokens, *sides)


@contextmanager
def _rank(layout: RankLayout, page_counts: dict[str, int]) -> Iterator[Rank]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    to, come = process.stdin, process.stdout
    if to is None or come is None:
        raise RuntimeError("a process without pipes")
    try:
        counts = [page_counts[region.group] for region in layout.regions]
        strides = [region.page_stride_bytes for region in layout.regions]
        sizes = [count * stride for count, stride in zip(counts, strides, strict=True)]
        to.write(json.dumps([*sizes, STAGING_BYTES]) + "\n")
        to.flush()
        told = json.loads(come.readline())
        *addresses, staging_address = told["addresses"]
        memory = RegionTable(*(np.array(v, np.int64) for v in (addresses, strides, counts)))
        yield Rank(to, come, memory, staging_address, told["name"], told["metadata"])
    finally:
        to.close()
        process.wait()


def main() -> None:
    torch.set_num_threads(1)
    transport = NixlTransport("bare")
    memory = [touched(size) for size in json.loads(sys.stdin.readline())]
    for piece in memory:
        transport.register(piece.ctypes.data, piece.nbytes, HOST)
    _say(
        {
            "name": transport.name,
            "metadata": base64.b64encode(transport.metadata()).decode(),
            "addresses": [piece.ctypes.data for piece in memory],
        }
    )
    reads: list[tuple[str, Descriptors]] = []
    pause_s = 0.001  # connections are made by both sides
    while True:
        transport.progress()
        if not select.select([sys.stdin], [], [], pause_s)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            break
        told = json.loads(line)
        if told == "go":
            _read(transport, reads)
        elif told == "rest":
            pause_s = 0.1
        elif "peers" in told:
            for name, metadata in told["peers"]:
                transport.prepare(name, Known(base64.b64decode(metadata)))
        else:
            reads = [
                (peer, Descriptors(*(np.array(column, np.int64) for column in columns)))
                for peer, columns in told["pieces"]
            ]
        _say("done")
    transport.close()


def _read(transport: NixlTransport, reads: Sequence[tuple[str, Descriptors]]) -> None:
    flying = [
        transport.post(Read(peer, pieces, HOST, HOST), lambda: None) for peer, pieces in reads
    ]
    while flying:
        rest = [flight for flight in flying if not transport.poll(flight)]
        for flight in set(flying) - set(rest):
            transport.release(flight)
        flying = rest
        transport.progress()


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
