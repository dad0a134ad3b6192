"""Check an engine's lists of block ids, and keep track of the blocks in use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from restow.broker.block_ids import ID_BYTES, check_whole, unpacked, unsigned
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import Account
from restow.broker.errors import (
    NullBlockError,
    PageCountError,
    PageRangeError,
    PageRepeatedError,
    PagesError,
)

FEW = 32
"""Up to this many ids, a set finds duplicates faster than a sorted array."""


@dataclass(slots=True, eq=False)
class BlockLists:
    """The rules for an engine's block lists, by group."""

    key: EngineKey
    block_tokens: dict[str, int]
    """Tokens per block of each group; 0 if the group holds snapshots."""
    null_blocks: dict[str, int]
    """The null block's id for each group that has a null block."""
    block_limits: dict[str, int]
    """For each group, the lowest block count of all connected ranks; ids must be below it."""
    overlaid: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)
    """Groups whose blocks with equal ids share memory on some connected rank. Engines place groups
    of layers over the same bytes and give each block to a single group at a time."""

    def together(self, group: str) -> tuple[str, ...]:
        """Return the groups that share memory with ``group``, including ``group``."""
        return next((groups for groups in self.overlaid if group in groups), (group,))

    def check_overlaid(self, blocks: Mapping[str, bytes]) -> None:
        """Raise `PageRepeatedError` if lists of two overlaid groups name the same block."""
        for groups in self.overlaid:
            ids = [unsigned(blocks[group]) for group in groups if blocks.get(group)]
            nulls = [self.null_blocks[group] for group in groups if group in self.null_blocks]
            named = np.concatenate(ids) if len(ids) > 1 else np.empty(0, np.uint32)
            named = named[~np.isin(named, nulls)]
            if named.size:
                self.check_distinct(" or ".join(groups), named.tobytes())

    def check_ids(self, group: str, data: bytes) -> None:
        """Raise a `PagesError` unless the ids are distinct int32 inside the group's memory.

        Null blocks may repeat, but a snapshot must not be a null block.
        """
        limit = self.block_limits.get(group)
        if limit is None:
            raise PagesError(
                f"engine {self.key.engine_id} has no group {group!r}; it has "
                f"{sorted(self.block_limits)}",
                group=group,
            )
        size_bytes = len(data)
        if not size_bytes:
            return
        if size_bytes == ID_BYTES:  # a snapshot's single id needs no array
            highest = int.from_bytes(data, "little")
        else:
            if size_bytes % ID_BYTES:
                check_whole(group, data)
            highest = self.check_distinct(group, data)
        if highest >= limit:
            wrong = unpacked(group, data).item(int(np.argmax(unsigned(data) >= limit)))
            raise PageRangeError(
                f"engine {self.key.engine_id}, group {group}: block {wrong} is outside of "
                f"[0, {limit})",
                engine=self.key.engine_id,
                group=group,
                page=wrong,
                range=f"[0, {limit})",
            )
        if self.block_tokens[group] == 0:
            if size_bytes > ID_BYTES:
                raise self._miscounted(group, 0, size_bytes // ID_BYTES, 0)
            if highest == self.null_blocks.get(group):
                raise self.given_null(group, highest, "a snapshot")

    def check_distinct(self, group: str, data: bytes) -> int:
        """Return the highest id of a non-empty list, read as unsigned.

        Raises `PageRepeatedError` if any id except the null block occurs twice.
        """
        ids = unsigned(data)
        if ids.size <= FEW:
            few: list[int] = ids.tolist()
            if len(set(few)) == len(few):
                return max(few)
        ordered = ids.copy()
        ordered.sort()
        same = ordered[1:] == ordered[:-1]
        if not np.count_nonzero(same):
            return ordered.item(-1)
        twice, null = ordered[1:][same], self.null_blocks.get(group)
        if null is not None:
            twice = twice[twice != null]
        if twice.size:
            page = twice.item(0)
            raise PageRepeatedError(
                f"engine {self.key.engine_id}, group {group}: block {page} occurs more than once, "
                f"and the layout does not declare it as the null block: name each page once",
                engine=self.key.engine_id,
                group=group,
                page=page,
            )
        return ordered.item(-1)

    def given_null(self, group: str, page: int, what: str) -> NullBlockError:
        """Return the error for a null block that is named for ``what`` although that is moved."""
        return NullBlockError(
            f"engine {self.key.engine_id}, group {group}: block {page} is the null block, but is "
            f"named for {what}: name blocks that the request owns",
            engine=self.key.engine_id,
            group=group,
            page=page,
        )

    def check_no_null(
        self, group: str, blocks: Mapping[str, bytes], first_token: int, stop_token: int
    ) -> None:
        """Raise `NullBlockError` if the list names the null block for tokens that are moved."""
        null, tokens = self.null_blocks.get(group), self.block_tokens[group]
        if null is None or first_token >= stop_token:
            return
        first = first_token // tokens
        ids = unsigned(blocks[group])[first : -(-stop_token // tokens)]
        (given,) = (ids == null).nonzero()
        if given.size:
            at = max((first + given.item(0)) * tokens, first_token)
            raise self.given_null(group, null, f"token {at} of [{first_token}, {stop_token})")

    def check_counts(
        self, groups: Iterable[str], blocks: Mapping[str, bytes], position_tokens: int
    ) -> None:
        """Raise `PageCountError` unless each group's list holds a prompt up to the position."""
        for group in groups:
            tokens, count = self.block_tokens[group], len(blocks.get(group, b"")) // ID_BYTES
            if count != 1 if tokens == 0 else count * tokens < position_tokens:
                raise self._miscounted(group, tokens, count, position_tokens)

    def _miscounted(
        self, group: str, tokens: int, count: int, position_tokens: int
    ) -> PageCountError:
        if tokens == 0:
            return PageCountError(
                f"engine {self.key.engine_id}, group {group} holds snapshots: exactly one "
                f"block is required, got {count}",
                group=group,
                count=count,
            )
        return PageCountError(
            f"engine {self.key.engine_id}, group {group}: {count} blocks of {tokens} tokens "
            f"do not hold {position_tokens} tokens",
            group=group,
            count=count,
        )


FEW_BYTES = 16 * ID_BYTES
"""Up to this length, Python handles lists faster id by id than numpy does."""
FIRST_BLOCKS = 1 << 12
"""Blocks that a new table has room for, unless the group has fewer blocks."""
FIRST_NUMBERS = 1 << 12
"""Numbers of demands before numbering starts again; more if an engine has more blocks."""
BLOCK_BYTES = 12
"""Bytes per block in the two arrays of a table."""

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Blocks = Mapping[str, bytes]


class WantedBlocks(Protocol):
    """The blocks that a demand names."""

    @property
    def blocks(self) -> Blocks:
        """Return the packed ids of each group."""
        ...

    @property
    def held_tokens(self) -> int:
        """Return the number of leading tokens that are only read."""
        ...


class Writer(Protocol):
    """A handoff as `PagesInUse` sees it."""

    handoff_id: str
    number: int
    writing: int
    """The number under which its blocks are taken; 0 if they are not taken."""

    @property
    def demand(self) -> WantedBlocks:
        """Return D's demand."""
        ...


class _Table:
    """The blocks of a group, or of several groups that share memory."""

    def __init__(self, size: int, older: Iterable[_Table], opened: Uint8s) -> None:
        """Make room for ``size`` blocks; copy entries of older tables whose demands are open."""
        self.size = size
        self.writers: Int64s = np.zeros(size, np.int64)
        """By block, the number of the last demand that writes it; 0 if none ever did."""
        self.readers: Int32s = np.zeros(size, np.int32)
        """By block, the number of open publications and demands that only read it."""
        self.reads: bool = any(table.reads for table in older)
        """Whether any publication or demand ever read a block of the table."""
        for table in older:
            known = slice(len(table.writers))
            self.writers[known] = np.where(
                opened.take(table.writers), table.writers, self.writers[known]
            )
            self.readers[known] += table.readers
        self.by_one = self.writers.data


class PagesInUse:
    """The blocks of an engine that open demands and publications use."""

    def __init__(self, lists: BlockLists, account: Account) -> None:
        """Begin with no block in use; ``account`` is the tenant's."""
        self.size_bytes = 0
        """Size of the tables."""
        self.demands: dict[int, Writer] = {}
        """Open demands by number, of live handoffs and of handoffs in quarantine."""
        self.publications: dict[object, tuple[str, Blocks]] = {}
        """For each of P's open sides: the handoff id and the published blocks."""
        self._lists, self._account = lists, account
        self._tables: dict[str, _Table] = {}
        """Tables by group; groups that share memory share a table."""
        self._last = 0
        self._opened = bytearray(FIRST_NUMBERS)
        """By number, 1 while the demand is open."""
        self._opened_array = np.frombuffer(self._opened, np.uint8)

    # -- demands ----------------------------------------------------------------------------------

    def take(self, handoff: Writer, blocks: Blocks, held_tokens: int) -> None:
        """Take the blocks of a new demand; blocks after ``held_tokens`` will be written.

        Raises `PageRepeatedError` if another open demand or publication uses a block, and what
        `Account.keep` raises; in either case nothing is taken.
        """
        number = self._last + 1
        if number >= len(self._opened):
            number = self._more_numbers()
        self._last = number  # entries of a demand that is then refused count for nothing
        opened, tables, nulls = self._opened, self._tables, self._lists.null_blocks
        for group, data in blocks.items():
            size_bytes, table = len(data), tables.get(group)
            held = self._held(group, held_tokens) if held_tokens else 0
            if not size_bytes:
                continue
            if size_bytes <= FEW_BYTES and (table is None or not table.reads):
                few: list[int]
                if size_bytes == ID_BYTES:
                    few = [int.from_bytes(data, "little")]
                else:
                    few = unsigned(data).tolist()
                if table is None or max(few) >= table.size:
                    table = self._grown(group, max(few))
                writers = table.by_one
                for block in few:
                    if opened[writers[block]]:
                        raise self._written(handoff.handoff_id, group, block, writers[block])
                for block in few[held:]:
                    writers[block] = number
            else:
                table, ids = self._unwritten(handoff.handoff_id, group, data)
                written = ids[held:]
                if table.reads:
                    self._check_unread(handoff.handoff_id, table, group, written)
                table.writers[written] = number
            if (null := nulls.get(group)) is not None and null < table.size:
                table.writers[null] = 0
        if held_tokens:
            self._count(self._held_of(blocks, held_tokens), 1)
        opened[number] = 1
        self.demands[number] = handoff
        handoff.writing = number

    def _unwritten(self, handoff_id: str, group: str, data: bytes) -> tuple[_Table, Int64s]:
        """Return the group's table and the ids, none of which an open demand will write."""
        ids = unsigned(data).astype(np.int64)
        table = self._tables.get(group) or self._grown(group, 0)
        try:
            writers = table.writers.take(ids)
        except IndexError:
            table = self._grown(group, ids.max().item())
            writers = table.writers.take(ids)
        index = self._opened_array.take(writers).tobytes().find(1)
        if index >= 0:
            raise self._written(handoff_id, group, ids.item(index), writers.item(index))
        return table, ids

    def _check_unread(self, handoff_id: str, table: _Table, group: str, ids: Int64s) -> None:
        read = table.readers.take(ids)
        if np.count_nonzero(read):
            raise self._read(handoff_id, group, ids.item(int(read.argmax())))

    def forget_held(self, blocks: Blocks, held_tokens: int) -> None:
        """Remove a demand's reads of the blocks that hold its held tokens."""
        self._count(self._held_of(blocks, held_tokens), -1)

    def give_back(self, handoff: Writer) -> None:
        """Remove a demand's writes; its blocks belong to the engine again."""
        if handoff.writing:
            self._opened[handoff.writing] = 0
            del self.demands[handoff.writing]
            handoff.writing = 0

    def move(self, handoff: Writer, target: Writer) -> None:
        """Transfer a demand from a handoff to another handoff."""
        if handoff.writing:
            self.demands[handoff.writing] = target
            target.writing, handoff.writing = handoff.writing, 0

    def _held(self, group: str, held_tokens: int) -> int:
        """Return the number of leading blocks held whole; a partly held block is written."""
        tokens = self._lists.block_tokens[group]
        return held_tokens // tokens if tokens else 0

    def _held_of(self, blocks: Blocks, held_tokens: int) -> Blocks:
        return {
            group: data[: ID_BYTES * self._held(group, held_tokens)]
            for group, data in blocks.items()
        }

    # -- publications -----------------------------------------------------------------------------

    def publish(self, side: object, handoff_id: str, blocks: Blocks) -> None:
        """Record that the publication of P's ``side`` reads exactly these blocks.

        Raises `PageRepeatedError` if an open demand will write a block, and what `Account.keep`
        raises; in either case nothing changes.
        """
        before = self.publications[side][1] if side in self.publications else {}
        grows = all(blocks.get(group, b"").startswith(data) for group, data in before.items())
        known = before if grows else {}
        more = {group: data[len(known.get(group, b"")) :] for group, data in blocks.items()}
        for group, data in more.items():
            if data:
                self._unwritten(handoff_id, group, data)
        if not grows:
            self._count(before, -1)
        self._count(more, 1)
        self.publications[side] = (handoff_id, blocks)

    def unpublish(self, side: object) -> None:
        """Remove a publication's reads."""
        if (published := self.publications.pop(side, None)) is not None:
            self._count(published[1], -1)

    # -- inside -----------------------------------------------------------------------------------

    def _count(self, blocks: Blocks, step: int) -> None:
        for group, data in blocks.items():
            if data:  # the ids were checked before, so the table has room
                table = self._tables[group]
                table.reads = True
                table.readers[unsigned(data).astype(np.int64)] += step
                null = self._lists.null_blocks.get(group)
                if null is not None and null < table.size:  # the null block belongs to nobody
                    table.readers[null] = 0

    def _grown(self, group: str, highest: int) -> _Table:
        """Return the group's table with room for block ``highest``."""
        # A publication from before an agent with less memory joined may exceed the present limit.
        limit = max(self._lists.block_limits[group], highest + 1)
        size = min(limit, FIRST_BLOCKS)
        while size <= highest:
            size = min(limit, 2 * size)
        return self._join(self._lists.together(group), size)

    def join(self, groups: Sequence[str]) -> None:
        """Let groups that prove to share memory share a table."""
        if len({id(self._tables.get(group)) for group in groups}) > 1:
            self._join(groups, 1)

    def _join(self, groups: Sequence[str], size: int) -> _Table:
        """Merge the groups' tables into a single table of at least ``size`` blocks."""
        older = {
            id(table): table for group in groups if (table := self._tables.get(group))
        }.values()
        size = max(size, *(table.size for table in older), 1)
        more_bytes = BLOCK_BYTES * (size - sum(table.size for table in older))
        self._account.keep(more_bytes)
        self.size_bytes += more_bytes
        table = _Table(size, older, self._opened_array)
        self._tables.update(dict.fromkeys(groups, table))
        return table

    def _more_numbers(self) -> int:
        """Make room for more demand numbers; return the next number."""
        tables = {id(table): table for table in self._tables.values()}.values()
        blocks = sum(table.size for table in tables)
        if blocks <= len(self._opened) >= 2 * len(self.demands):
            self._number_anew(tables)
        else:
            self._opened = self._opened + bytes(len(self._opened))
        self._opened_array = np.frombuffer(self._opened, np.uint8)
        return self._last + 1

    def _number_anew(self, tables: Iterable[_Table]) -> None:
        """Renumber open demands from 1, so that `_opened` stays small."""
        renamed = np.zeros(len(self._opened), np.int64)
        demands = dict(enumerate(self.demands.values(), 1))
        for number, handoff in demands.items():
            renamed[handoff.writing] = handoff.writing = number
        for table in tables:
            table.writers[:] = renamed.take(table.writers)
        self.demands, self._last = demands, len(demands)
        self._opened = bytearray(len(renamed))
        self._opened[1 : len(demands) + 1] = b"\1" * len(demands)

    def _written(self, handoff_id: str, group: str, block: int, number: int) -> PageRepeatedError:
        other_id = self.demands[number].handoff_id
        return self._repeated(handoff_id, group, block, other_id, "to be written")

    def _read(self, handoff_id: str, group: str, block: int) -> PageRepeatedError:
        groups = self._lists.together(group)
        held = (
            (writer.handoff_id, self._held_of(writer.demand.blocks, writer.demand.held_tokens))
            for writer in self.demands.values()
        )
        other_id = next(
            name
            for name, blocks in itertools.chain(self.publications.values(), held)
            if any(block in unsigned(blocks.get(member, b"")) for member in groups)
        )
        return self._repeated(handoff_id, group, block, other_id, "read")

    def _repeated(
        self, handoff_id: str, group: str, block: int, other_id: str, how: str
    ) -> PageRepeatedError:
        engine_id = self._lists.key.engine_id
        return PageRepeatedError(
            f"engine {engine_id}, group {group}: block {block} of handoff {handoff_id} is {how} by "
            f"handoff {other_id}, which has not ended: name a block that no other open handoff "
            f"uses",
            engine=engine_id,
            group=group,
            page=block,
            handoff=handoff_id,
            other_handoff=other_id,
        )

    def wrong(self) -> Iterator[str]:
        """Yield differences between the tables and the open demands and publications."""
        for group, table in self._tables.items():
            readers, groups = np.zeros(table.size, np.int32), self._lists.together(group)
            words = [blocks for _, blocks in self.publications.values()]
            for number, handoff in self.demands.items():
                blocks, held_tokens = handoff.demand.blocks, handoff.demand.held_tokens
                words.append(self._held_of(blocks, held_tokens))
                for name in groups:
                    ids = unsigned(blocks.get(name, b""))[self._held(name, held_tokens) :]
                    null = self._lists.null_blocks.get(name)
                    if (
                        not (handoff.writing == number and self._opened[number])
                        or (table.writers[ids[ids != null]] != number).any()
                    ):
                        yield f"group {name}: handoff {handoff.handoff_id} does not own its blocks"
            for blocks in words:
                for name in groups:
                    readers[np.unique(unsigned(blocks.get(name, b"")))] += 1
            for null in (self._lists.null_blocks.get(name) for name in groups):
                if null is not None and null < table.size:
                    readers[null] = 0
            if (readers != table.readers).any():
                yield f"group {group}: wrong numbers of readers by block: {table.readers}"
