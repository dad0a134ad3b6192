"""Read the pieces of a plan by NIXL alone, without broker or agents, from as many processes.

The reference shows how much of a handoff's time any user of NIXL pays for the same descriptors.
Run as a module, this file is the process of one rank, which takes lines of JSON from stdin.
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

from bench.processes import module, open_log
from bench.rank_process import touched
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange, staged_spans
from restow.agents.binding.reads import Descriptors, Reads, SpanReads
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Known, Read
from restow.agents.reading.nixl_transport import NixlTransport
from restow.broker.layout import RankLayout
from restow.broker.planner import Plan, Program, compile_programs
from restow.broker.planner.program import GATHER_IN_ORDER, READ_PAGES, READ_SPANS, Column

BlockIds = Mapping[str, Sequence[int]]
STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class Rank:
    """The process of one rank, and where its memory is."""

    to: IO[str]
    come: IO[str]
    memory: RegionTable
    staging_address: int
    name: str
    metadata: str

    def ask(self, message: object) -> None:
        """Send a message."""
        self.to.write(json.dumps(message) + "\n")
        self.to.flush()

    def hear(self) -> Any:
        """Wait for the answer."""
        return json.loads(self.come.readline())


class NixlAlone:
    """The ranks of a plan, and the programs that say what they read."""

    def __init__(
        self, plan: Plan, tokens: int, sources: dict[int, Rank], readers: dict[int, Rank]
    ) -> None:
        self._programs = compile_programs(plan)
        self._tokens = TokenRange(0, tokens)
        self._sources, self._readers = sources, readers
        for reader in readers.values():
            reader.ask({"peers": [(source.name, source.metadata) for source in sources.values()]})
            reader.hear()

    @property
    def complete(self) -> bool:
        """Return whether all bytes are read out of pages, so that no source gathers any first."""
        return not any(len(program.rows(GATHER_IN_ORDER)) for program in self._programs)

    def rest(self) -> None:
        """Poll seldom from now on, so that the processors are free for other processes."""
        for rank in (*self._sources.values(), *self._readers.values()):
            rank.ask("rest")
            rank.hear()

    def read(self, src_ids: BlockIds, dst_ids: BlockIds) -> float:
        """Read everything once; return the seconds until the last rank has all its bytes."""
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
    return Blocks({group: np.array(block_ids, np.int64) for group, block_ids in ids.items()})


@contextmanager
def nixl_alone(plan: Plan, tokens: int, page_counts: dict[str, int]) -> Iterator[NixlAlone]:
    """Run a process with memory for each rank of ``plan``."""
    with ExitStack() as stack:
        sides = [
            {rank.rank: stack.enter_context(_rank(rank, page_counts)) for rank in layout.ranks}
            for layout in (plan.source, plan.destination)
        ]
        yield NixlAlone(plan, tokens, *sides)


@contextmanager
def _rank(layout: RankLayout, page_counts: dict[str, int]) -> Iterator[Rank]:
    with open_log("nixl-alone") as log:
        process = subprocess.Popen(
            module("bench.transfer.nixl_alone"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    to, come = process.stdin, process.stdout
    if to is None or come is None:
        raise RuntimeError("a process has no pipes")
    try:
        counts = [page_counts[region.group] for region in layout.regions]
        strides = [region.page_stride_bytes for region in layout.regions]
        sizes = [count * stride for count, stride in zip(counts, strides, strict=True)]
        to.write(json.dumps([*sizes, STAGING_BYTES]) + "\n")
        to.flush()
        answer = json.loads(come.readline())
        *addresses, staging_address = answer["addresses"]
        memory = RegionTable(*(np.array(v, np.int64) for v in (addresses, strides, counts)))
        yield Rank(to, come, memory, staging_address, answer["name"], answer["metadata"])
    finally:
        to.close()
        process.wait()


def main() -> None:
    """Serve as one rank until stdin is closed."""
    torch.set_num_threads(1)
    transport = NixlTransport("alone")
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
        order = json.loads(line)
        if order == "go":
            _read(transport, reads)
        elif order == "rest":
            pause_s = 0.1
        elif "peers" in order:
            for name, metadata in order["peers"]:
                transport.prepare(name, Known(base64.b64decode(metadata)))
        else:
            reads = [
                (peer, Descriptors(*(np.array(column, np.int64) for column in columns)))
                for peer, columns in order["pieces"]
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
