"""A run: what one source rank gathers for one reader, and what the reader scatters out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.agents.binding.copies import Copies, bind_copies
from restow.agents.binding.operands import DST, SRC, BoundOperand, by_place, in_order
from restow.agents.binding.pages import Tokens
from restow.agents.binding.staging import staged_bytes
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    GATHER_PLACED,
    SCATTER_PLACED,
    GroupPair,
    Program,
)
from restow.broker.planner.program.chunk import INTERLEAVED_TO, RESTORED_FROM, chunk_bytes


@dataclass(frozen=True, slots=True)
class GatheredRun:
    """First a chunk, whose rows say where in it they lie, then packed rows in their order."""

    pairs: Sequence[GroupPair]
    tokens: Tokens
    placed: Int64s
    packed: Int64s
    chunk_bytes: int
    length_bytes: int

    @classmethod
    def at_source(cls, program: Program, src_rank: int, tokens: Tokens) -> GatheredRun:
        """What ``src_rank`` gathers for the reader whose program it is."""
        placed = program.rows(GATHER_PLACED, src_rank)
        return cls._of(program, src_rank, tokens, placed, chunk_bytes(placed, INTERLEAVED_TO))

    @classmethod
    def at_destination(cls, program: Program, src_rank: int, tokens: Tokens) -> GatheredRun:
        """The same run as its reader knows it."""
        placed = program.rows(SCATTER_PLACED, src_rank)
        return cls._of(program, src_rank, tokens, placed, chunk_bytes(placed, RESTORED_FROM))

    @classmethod
    def _of(
        cls, program: Program, src_rank: int, tokens: Tokens, placed: Int64s, chunk: int
    ) -> GatheredRun:
        packed, pairs = program.rows(GATHER_IN_ORDER, src_rank), program.group_pairs
        length = chunk + staged_bytes(packed, pairs, tokens)
        return cls(pairs, tokens, placed, packed, chunk, length)

    def gather(self, pages: BoundOperand, address: int) -> list[Copies]:
        """From the source's pages to the run at ``address``."""
        return [
            bind_copies(self.placed, self.pairs, pages, by_place(address, DST), self.tokens),
            bind_copies(self.packed, self.pairs, pages, self._behind(address), self.tokens),
        ]

    def scatter(self, pages: BoundOperand, address: int) -> list[Copies]:
        """From the run at ``address`` to the destination's pages."""
        return [
            bind_copies(self.placed, self.pairs, by_place(address, SRC), pages, self.tokens),
            bind_copies(self.packed, self.pairs, self._behind(address), pages, self.tokens),
        ]

    def _behind(self, address: int) -> BoundOperand:
        """The packed rows of the run at ``address``."""
        return in_order(self.packed, self.pairs, self.tokens, address + self.chunk_bytes)
