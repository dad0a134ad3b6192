"""`ReplyEnds` knows where replies of a recurrent model ended, for which vLLM's cache has no name.

A request that has ended leaves its running states in a block that vLLM never finds again. The next
turn begins with the same tokens, so these stay worth having, for as long as nobody needs the room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from restow.agents.engines.common.groups import NULL_BLOCK, BlockLists, Group

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True, slots=True, eq=False)
class ReplyEnd:
    """A state after so many ``tokens``, in ``blocks`` as a handoff names them."""

    tokens: int
    blocks: dict[str, list[int]]
    kept: tuple[KVCacheBlock, ...]
    """Those that hold it, in the order of their tokens; states are the last."""


class ReplyEnds:
    """Those of one scheduler. Belongs to its thread.

    ::

        the request has ended     blocks are referred to, until vLLM has let go of them
        then                      free blocks, the last ones to be given to another request
        one of them is            vLLM says so (`unpin_blocks`), and the end is forgotten
    """

    def __init__(self, pool: BlockPool, groups: Sequence[Group]) -> None:
        """Know none."""
        self._pool = pool
        self._groups = tuple(groups)
        self._ends: dict[bytes, ReplyEnd] = {}
        self._by_block: dict[int, set[bytes]] = {}
        self._new: list[ReplyEnd] = []
        """Those of which vLLM has not let go yet."""
        self.come: dict[bytes, None] = {}
        self.gone: dict[bytes, None] = {}
        """What has changed since somebody took note."""

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here."""
        return bool(self._new)

    def get(self, name: bytes) -> ReplyEnd | None:
        """The end of just the tokens of a name; None: nobody ended there, or it is gone."""
        return self._ends.get(name)

    def note(self, name: bytes, tokens: int, blocks: BlockLists) -> bool:
        """A request ends whose state stands after ``tokens``; vLLM has not freed its blocks yet.

        Returns whether it is known from now on: one of these tokens may be known already, and
        among ``blocks`` one may be missing. Of drafts nobody can say where their states stand.
        """
        if name in self._ends or any(group.scratch_blocks for group in self._groups):
            return False
        named: dict[str, list[int]] = {}
        kept: list[int] = []
        for group in sorted(self._groups, key=lambda one: one.is_state):
            ids, size = blocks[group.name], group.block_tokens
            if not group.is_state:
                first, stop = group.first_token(tokens) // size, (tokens - 1) // size + 1
                needed = list(ids[first:stop])
                if len(needed) < stop - first or NULL_BLOCK in needed:
                    return False
                ids = [NULL_BLOCK] * first + needed
            named[group.name] = list(ids)
            kept += [one for one in ids if one != NULL_BLOCK]
        end = ReplyEnd(tokens, named, tuple(self._pool.blocks[one] for one in kept))
        self._pool.touch(end.kept)
        self._ends[name] = end
        for one in kept:
            self._by_block.setdefault(one, set()).add(name)
        self._new.append(end)
        self._turn(name, self.gone, self.come)
        return True

    def forget(self) -> None:
        """Know none any more: what they are named by is not what they were computed with.

        Their blocks are given back as ever.
        """
        for name in self._ends:
            self._turn(name, self.come, self.gone)
        self._ends.clear()
        self._by_block.clear()

    def settle(self) -> None:
        """Let go of those that vLLM has let go of: their states are in no request's use."""
        left = []
        for end in self._new:
            if end.kept[-1].ref_cnt > 1:
                left.append(end)
            else:
                self.give_back(reversed(end.kept))
        self._new = left

    def give_back(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give references back, those to be reused first in front. The ends in them stay known."""
        self._pool.unpin_blocks(blocks, self._reused)

    def _reused(self, block: KVCacheBlock) -> None:
        for name in self._by_block.get(block.block_id, set()).copy():
            for one in self._ends.pop(name).kept:
                names = self._by_block[one.block_id]
                names.discard(name)
                if not names:
                    del self._by_block[one.block_id]
            self._turn(name, self.come, self.gone)

    @staticmethod
    def _turn(name: bytes, was: dict[bytes, None], now: dict[bytes, None]) -> None:
        if name in was:
            del was[name]
        else:
            now[name] = None
