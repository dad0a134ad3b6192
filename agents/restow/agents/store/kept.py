"""The states in a store's memory, the pieces of which they consist, and the next state to evict.

``./run bench --suite eviction`` compares `Kept.worth` with least recently used.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from restow.agents.store.room import PageMove, PieceKey, Room, Shape, StateKey
from restow.broker.client import Prefix
from restow.broker.layout.store_layout import NULL_BLOCK


@dataclass(slots=True)
class Piece:
    """The content of a page, which stays in place while it has ``pins``."""

    page: int
    size_bytes: int
    pins: int = 0
    uses: float = 0.0
    clock: float = 0.0
    """The store's clock at the last use, or at the last commit of a state with this piece."""
    users: set[KeptState] = field(default_factory=set)
    """The states of which it is a part."""


@dataclass(slots=True, eq=False)
class KeptState:
    """A state. Uses of its last piece count as its own."""

    name: StateKey
    pieces: list[PieceKey]
    position_tokens: int
    block_hashes: tuple[bytes, ...]
    base: KeptState | None = None
    """The state that it extends; None for the beginning of the prompt."""
    own_bytes: int = 0
    """Bytes of pieces that no other state shares."""
    ticket: int = 0
    """Number of its entry in the queue of states to evict; other entries of it are obsolete."""

    @property
    def last_block(self) -> StateKey:
        """The key of the last whole block; states without a whole block share a salt's key."""
        return self.name._replace(hash=self.block_hashes[-1] if self.block_hashes else b"")


class States:
    """The states, and the pieces of each. For one thread at a time.

    If every block boundary is a state (`Shape.by_block`), an eviction takes the last block of a
    state, and the rest stays. Else it takes the whole state, except pieces that others share.
    """

    def __init__(self, shape: Shape, free: Callable[[PieceKey, Piece], None]) -> None:
        """Begin empty; ``free`` is called with each piece that goes."""
        self.pieces: dict[PieceKey, Piece] = {}
        self.by_key: dict[StateKey, KeptState] = {}
        self.cheaper: dict[KeptState, None] = {}
        """States that are new, or of which an eviction frees more than before."""
        self._at: dict[StateKey, list[KeptState]] = defaultdict(list)
        """States by their last whole block: those that end in or at the end of it."""
        self._shape, self._free = shape, free

    def add(self, state: KeptState) -> None:
        """Add a state whose pieces exist, unless it is there already."""
        if state.name in self.by_key:
            return
        self.by_key[state.name] = state
        self.cheaper[state] = None
        for key in state.pieces:
            self._join(key, state)
        if not self._shape.by_block:
            state.base = self._find_base(state)
            self._at[state.last_block].append(state)

    def forget(self, state: KeptState) -> None:
        """Drop a state; pieces that other states share stay."""
        del self.by_key[state.name]
        self.cheaper.pop(state, None)
        state.ticket = 0
        if not self._shape.by_block:
            at = self._at[state.last_block]
            at.remove(state)
            if not at:
                del self._at[state.last_block]
        for key in state.pieces:
            self._leave(key, state)

    def evict(self, state: KeptState) -> None:
        """Drop a state, or its last block."""
        blocks = len(state.pieces) - 1
        if not (self._shape.by_block and blocks):
            self.forget(state)
            return
        self._leave(state.pieces.pop(), state)
        end = state.pieces[-1]
        if len(self.pieces[end].users) > 1:  # the rest is part of another state
            self.forget(state)
            return
        del self.by_key[state.name]
        state.name = state.name._replace(hash=end.hash)
        state.position_tokens = blocks * self._shape.block_tokens
        self.by_key[state.name] = state
        self.cheaper[state] = None

    def lost(self, state: KeptState) -> tuple[int, int]:
        """Return how many tokens and bytes an eviction takes."""
        if self._shape.by_block:
            last = self.pieces[state.pieces[-1]]
            whole_tokens = (len(state.pieces) - 1) * self._shape.block_tokens
            freed_bytes = last.size_bytes if len(last.users) == 1 else 0
            return state.position_tokens - whole_tokens, freed_bytes
        return state.position_tokens - self.base_tokens(state), state.own_bytes

    def base_tokens(self, state: KeptState) -> int:
        """Return the position of the nearest state that this state extends; 0 if there is none."""
        if state.base and self.by_key.get(state.base.name) is not state.base:
            state.base = self._find_base(state)
        return state.base.position_tokens if state.base else 0

    def before(self, name: StateKey, block_hashes: Iterable[bytes]) -> set[int]:
        """Return the positions of states that end in one of these blocks, or before the first."""
        return {
            state.position_tokens
            for hashed in (*block_hashes, b"")
            for state in self._at.get(name._replace(hash=hashed), ())
        }

    def pin(self, keys: Iterable[PieceKey]) -> None:
        """Keep pieces in place."""
        for key in keys:
            self.pieces[key].pins += 1

    def unpin(self, keys: Iterable[PieceKey]) -> None:
        """Allow pieces to move or go again."""
        for key in keys:
            self.pieces[key].pins -= 1
            self._drop_unused(key)

    def _find_base(self, state: KeptState) -> KeptState | None:
        """Find the nearest state before this state, by its blocks."""
        for at in (*reversed(state.block_hashes), b""):
            known = [
                other
                for other in self._at.get(state.name._replace(hash=at), ())
                if other.position_tokens < state.position_tokens
            ]
            if known:
                return max(known, key=lambda other: (other.position_tokens, other.name))
        return None

    def _join(self, key: PieceKey, state: KeptState) -> None:
        piece = self.pieces[key]
        if len(piece.users) == 1:
            (owner,) = piece.users
            owner.own_bytes -= piece.size_bytes
        piece.users.add(state)
        if len(piece.users) == 1:
            state.own_bytes += piece.size_bytes

    def _leave(self, key: PieceKey, state: KeptState) -> None:
        piece = self.pieces[key]
        piece.users.discard(state)
        if not piece.users:
            state.own_bytes -= piece.size_bytes
        elif len(piece.users) == 1:
            (owner,) = piece.users
            owner.own_bytes += piece.size_bytes
            self.cheaper[owner] = None
        self._drop_unused(key)

    def _drop_unused(self, key: PieceKey) -> None:
        piece = self.pieces[key]
        if not piece.users and not piece.pins:
            del self.pieces[key]
            self._free(key, piece)


MARK_USES = 8
"""Uses with which a state begins that a request has marked."""
REMEMBERED = 4
"""Evicted pieces that are remembered, for each kept piece."""
RETURN_USES = 12
"""Uses for which the return of an evicted piece counts, if there are as many returns as uses."""
RECENT_USES = 1 << 16
"""After this many uses, uses and returns so far count half."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pages of one state that stay as they are until they are given up.

    ``blocks`` are the page lists that a handoff names. They hold the state's first ``held_tokens``
    tokens already; ``new`` pages are to be written.
    """

    prefix: Prefix
    blocks: dict[str, list[int]]
    held: tuple[PieceKey, ...]
    held_tokens: int = 0
    new: dict[PieceKey, int] = field(default_factory=dict)

    def pages(self) -> Iterator[tuple[PieceKey, int]]:
        """Yield each piece that is held, with its page; new pages are left out."""
        pages = (page for ids in self.blocks.values() for page in ids if page != NULL_BLOCK)
        return zip(self.held, pages, strict=True)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room for a state: its pages, and the moves to make before they are written."""

    pinned: Pinned
    moves: tuple[PageMove, ...]


class Kept:
    """The states in a store's memory. For one thread at a time."""

    def __init__(
        self,
        shape: Shape,
        room: Room,
        changed: Callable[[PieceKey, bool], None] = lambda *_: None,
    ) -> None:
        """Begin empty; ``changed`` is called with each piece that is added (True) or removed."""
        self.shape, self.room = shape, room
        self._changed = changed
        self._states = States(shape, self._gone)
        self._pieces = self._states.pieces
        self._queue: list[tuple[float, int, KeptState]] = []
        """A heap of worths, tickets and states. A worth may have risen since it was put here."""
        self._tickets = count(1)
        self._clock = 0.0
        """The greatest worth of all states evicted so far."""
        self._evicted: OrderedDict[PieceKey, float] = OrderedDict()
        """Uses of pieces that are no longer kept, the oldest first."""
        self._recent_uses = self._recent_returns = 1.0
        self._writing: set[tuple[str, int]] = set()
        """New pages that are not pieces yet."""
        self.evictions = 0

    def __len__(self) -> int:
        """Return the number of kept states."""
        return len(self._states.by_key)

    def holds(self, prefix: Prefix) -> bool:
        """Return whether all pieces of the state are kept."""
        return not self.missing(prefix)

    def missing(self, prefix: Prefix) -> list[PieceKey]:
        """Return the pieces of a state that are not kept."""
        return self.lacks(_keys(self.shape.pieces(prefix)))

    def lacks(self, keys: Iterable[PieceKey]) -> list[PieceKey]:
        """Return the pieces that are not kept."""
        return [key for key in keys if key not in self._pieces]

    def pin(self, prefix: Prefix) -> Pinned | None:
        """Pin a state and count it as used; None if it is not kept."""
        pinned = self.pin_quietly(prefix)
        if pinned is not None:
            self._touch(pinned.held, uses=1)
        return pinned

    def use(self, prefix: Prefix) -> None:
        """Count a state as used, if it is kept; one that was dropped while it is read stays."""
        pinned = self.pin(prefix)
        if pinned is None:
            return
        if any(not self._pieces[key].users for key in pinned.held):
            self._add(prefix)
        self._states.unpin(pinned.held)

    def pin_quietly(self, prefix: Prefix) -> Pinned | None:
        """Pin a state without counting it as used; None if it is not kept."""
        listed = self.shape.pieces(prefix)
        keys = tuple(_keys(listed))
        if not all(key in self._pieces for key in keys):
            return None
        self._states.pin(keys)
        blocks = {
            group: [NULL_BLOCK if key is None else self._pieces[key].page for key in keys_of_group]
            for group, keys_of_group in listed.items()
        }
        return Pinned(prefix, blocks, keys, prefix.position_tokens)

    def reserve(self, prefix: Prefix) -> Reserved | None:
        """Find pages for a state of which parts may be kept; None if there is no room.

        The least valuable states are evicted for it, but no pinned states.
        """
        listed = self.shape.pieces(prefix)
        held_tokens = self._held_tokens(listed, prefix)
        held, wanted = self._split(listed, held_tokens)
        counts = Counter(key.group for key in wanted)
        self._states.pin(held)
        moves: list[PageMove] = []
        if not self._make_room(counts, moves):
            self._states.unpin(held)
            return None
        pages = {group: iter(self.room.take(group, count)) for group, count in counts.items()}
        new = {key: next(pages[key.group]) for key in wanted}
        self._writing.update((key.group, page) for key, page in new.items())
        blocks = {group: [self._page(key, new) for key in keys] for group, keys in listed.items()}
        return Reserved(Pinned(prefix, blocks, held, held_tokens, new), tuple(moves))

    def commit(self, pinned: Pinned) -> None:
        """Keep a state whose new pages are written, and unpin it."""
        prefix, brought = pinned.prefix, []
        for key, page in pinned.new.items():
            self._writing.remove((key.group, page))
            if key in self._pieces:  # another handoff brought this piece meanwhile
                self.room.give(key.group, page)
            else:
                stride, uses = self.room.strides[key.group], self._uses_before(key)
                self._pieces[key] = Piece(page, stride, pins=1, uses=uses)
                self._changed(key, True)
                brought.append(key)
        keys = self._add(prefix)
        self._touch(keys, uses=0)
        if prefix.marked:
            last = self._pieces[keys[-1]]
            last.uses = max(last.uses, MARK_USES)
        self._states.unpin((*pinned.held, *brought))

    def give_up(self, pinned: Pinned) -> None:
        """Unpin pages that are no longer read or written; new pages become free."""
        for key, page in pinned.new.items():
            self._writing.remove((key.group, page))
            self.room.give(key.group, page)
        self._states.unpin(pinned.held)

    def longest(self, prefix: Prefix) -> Prefix | None:
        """Return the longest kept state whose tokens begin ``prefix``, or are all of it."""
        if self.holds(prefix):
            return prefix
        if self.shape.by_block:
            tokens = self._held_tokens(self.shape.pieces(prefix), prefix)
            return prefix.chain.prefix(tokens) if tokens else None
        known = self._states.before(StateKey.of(prefix), self.shape.block_hashes(prefix))
        for tokens in sorted(known, reverse=True):
            # A state between two quanta is named by a hash that the prefix does not have.
            if tokens < prefix.position_tokens and not tokens % prefix.form.quantum_tokens:
                shorter = prefix.chain.prefix(tokens)
                if self.holds(shorter):
                    return shorter
        return None

    def evict(self, prefix: Prefix) -> bool:
        """Drop the state after exactly these tokens; return False if it is not kept.

        Of a state of attention alone, longer states of the same prompt keep their blocks.
        """
        state = self._states.by_key.get(StateKey.of(prefix))
        if state is None:
            return False
        self._states.forget(state)
        return True

    def forget_revision(self, revision: str) -> None:
        """Drop all states that these weights computed; pinned pieces go when they are unpinned."""
        for state in [*self._states.by_key.values()]:
            if state.name.revision == revision:
                self._states.forget(state)

    def worth(self, state: KeptState) -> float:
        """Value a state; the least valuable is evicted. A use must not lower the value.

        This is Greedy-Dual-Size-Frequency: uses, times the tokens that are saved for each byte, on
        a clock that rises to the worth of what is evicted. So states that are no longer used are
        overtaken by others. A state whose eviction would free nothing stays.
        """
        tokens, freed_bytes = self._states.lost(state)
        last = self._pieces[state.pieces[-1]]
        return last.clock + (1 + last.uses) * tokens / freed_bytes if freed_bytes else math.inf

    # -- inside -----------------------------------------------------------------------------------

    def _add(self, prefix: Prefix) -> list[PieceKey]:
        """Add a state whose pieces are kept; return these."""
        keys, hashes = list(_keys(self.shape.pieces(prefix))), self.shape.block_hashes(prefix)
        self._states.add(KeptState(StateKey.of(prefix), keys, prefix.position_tokens, hashes))
        return keys

    def _held_tokens(self, listed: dict[str, list[PieceKey | None]], prefix: Prefix) -> int:
        """Return up to which token all groups have all whole blocks."""
        block_tokens = self.shape.block_tokens
        if not block_tokens:
            return 0
        blocks = prefix.position_tokens // block_tokens
        for group in self.shape.groups:
            if group.block_tokens:
                keys = listed[group.name][:blocks]
                have = (key is None or key in self._pieces for key in keys)
                blocks = next((index for index, held in enumerate(have) if not held), blocks)
        return blocks * block_tokens

    def _split(
        self, listed: dict[str, list[PieceKey | None]], held_tokens: int
    ) -> tuple[tuple[PieceKey, ...], list[PieceKey]]:
        """Return the pieces that stay, and those to write, though some of these may be kept."""
        held: list[PieceKey] = []
        wanted: list[PieceKey] = []
        for group in self.shape.groups:
            count = held_tokens // group.block_tokens if group.block_tokens else 0
            held += [key for key in listed[group.name][:count] if key is not None]
            wanted += [key for key in listed[group.name][count:] if key is not None]
        return tuple(held), wanted

    def _page(self, key: PieceKey | None, new: dict[PieceKey, int]) -> int:
        if key is None:
            return NULL_BLOCK
        return new[key] if key in new else self._pieces[key].page

    def _make_room(self, counts: Counter[str], moves: list[PageMove]) -> bool:
        needed = sum(self.room.strides[group] * count for group, count in counts.items())
        if needed > self.room.usable_bytes:
            return False
        while not self.room.can_take(counts):
            # Enough bytes are free, but scattered: move pages together before more is evicted.
            if self.room.free_bytes >= needed + self.room.slab_bytes and self._gather(moves):
                continue
            victim = self._victim()
            if victim is not None:
                self._states.evict(victim)
                self.evictions += 1
            elif not self._gather(moves):
                return False
        return True

    def _gather(self, moves: list[PageMove]) -> bool:
        pinned: dict[str, set[int]] = defaultdict(set)
        for group, page in self._writing:
            pinned[group].add(page)
        by_page: dict[tuple[str, int], Piece] = {}
        for key, piece in self._pieces.items():
            by_page[key.group, piece.page] = piece
            if piece.pins:
                pinned[key.group].add(piece.page)
        gathered = self.room.gather(pinned)
        for move in gathered:
            by_page[move.group, move.source].page = move.target
        moves += gathered
        return bool(gathered)

    def _victim(self) -> KeptState | None:
        """Take the least valuable state that can go from the queue; None if there is none."""
        for state in self._states.cheaper:
            self._enqueue(state)
        self._states.cheaper.clear()
        pinned: list[tuple[float, int, KeptState]] = []
        victim = None
        while self._queue and victim is None:
            entry = heappop(self._queue)
            worth, ticket, state = entry
            if ticket != state.ticket:
                continue
            if self._pieces[state.pieces[-1]].pins:  # every handoff pins a state's last piece
                pinned.append(entry)
            elif self.worth(state) > worth:
                self._enqueue(state)
            else:
                victim, self._clock = state, max(self._clock, worth)
        if victim is None and not pinned:
            # The longest state has a last piece of its own, unless somebody told false hashes.
            victim = next(iter(self._states.by_key.values()), None)
        for entry in pinned:
            heappush(self._queue, entry)
        return victim

    def _enqueue(self, state: KeptState) -> None:
        """Put a state into the queue, unless its eviction would free nothing."""
        state.ticket = next(self._tickets)
        worth = self.worth(state)
        if worth < math.inf:
            heappush(self._queue, (worth, state.ticket, state))

    def _touch(self, keys: Collection[PieceKey], uses: int) -> None:
        self._recent_uses += uses * len(keys)
        if self._recent_uses > RECENT_USES:
            self._recent_uses /= 2
            self._recent_returns /= 2
        for key in keys:
            piece = self._pieces[key]
            piece.uses += uses
            piece.clock = self._clock

    def _uses_before(self, key: PieceKey) -> float:
        """Return the uses with which a piece begins: more than before if it was evicted too early.

        Where pieces often return, few are found before they are evicted. Then the pieces that are
        known to return are worth far more than new ones, of which most never do. Where they seldom
        return, the last use predicts more; the square keeps returns from counting there.
        """
        uses = self._evicted.pop(key, None)
        if uses is None:
            return 0.0
        self._recent_returns += 1
        return uses + RETURN_USES * (self._recent_returns / self._recent_uses) ** 2

    def _gone(self, key: PieceKey, piece: Piece) -> None:
        self.room.give(key.group, piece.page)
        self._changed(key, False)
        self._evicted[key] = piece.uses
        while len(self._evicted) > REMEMBERED * (len(self._pieces) + 1):
            self._evicted.popitem(last=False)


def _keys(listed: dict[str, list[PieceKey | None]]) -> Iterator[PieceKey]:
    for keys in listed.values():
        for key in keys:
            if key is not None:
                yield key
