"""Whether what has arrived is what its sources hashed before it was read."""

from __future__ import annotations

from restow.agents.binding.extents import Extents, direct_extents
from restow.agents.binding.operands import DST
from restow.agents.binding.pages import RegionTable
from restow.agents.copying.hasher import DIGEST_BYTES, Hasher
from restow.agents.errors import DigestMismatchError, DigestMissingError
from restow.agents.execute.staged_reads import StagedReads
from restow.agents.link.orders import ExecuteOrder
from restow.broker.planner.program import Program


def check_digests_are_there(order: ExecuteOrder) -> None:
    """Raise `DigestMissingError` if a source's is not, before anything is read in vain."""
    for source in order.sources if order.hashed else ():
        if len(source.digest) != DIGEST_BYTES:
            raise DigestMissingError(
                f"what is read from rank {source.src_rank} is to be compared with a digest, and "
                f"the one given has {len(source.digest)} bytes, not {DIGEST_BYTES}",
                rank=source.src_rank,
            )


async def compare(
    program: Program, order: ExecuteOrder, staged: StagedReads, memory: RegionTable, hasher: Hasher
) -> None:
    """Hash what was read from each source, where it has landed.

    Before anything is copied out of staging: from there on casts and transposition change bytes.
    Raises `DigestMismatchError`.
    """
    for source in order.sources:
        rank = source.src_rank
        extents = arrived_extents(program, rank, order, staged, memory)
        if await hasher.digest(extents) != source.digest:
            raise DigestMismatchError(
                f"the {extents.size_bytes} bytes that were read from rank {rank} are not those "
                f"that it hashed before",
                rank=rank,
            )


def arrived_extents(
    program: Program, src_rank: int, order: ExecuteOrder, staged: StagedReads, memory: RegionTable
) -> Extents:
    """All that was read from a source rank: into own pages, and into ``staged`` memory."""
    blocks, tokens = order.dst_blocks, order.tokens
    direct = direct_extents(program, src_rank, memory, DST, blocks, tokens)
    return Extents.joined([*direct, *staged.extents(src_rank)])
