"""The states in a store's memory, the pieces of which they consist, and the next state to evict.

``./run bench --suite eviction`` measures `recomputing_cost` beside `least_recently_used`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from restow.agents.store.room import PageMove, PieceKey, Room, Shape, StateKey
from restow.broker.client import Prefix
from restow.broker.layout.store_layout import NULL_BLOCK


@dataclass(slots=True)
class Piece:
    """The content of a page, which stays in place while it has ``pins``."""

    page: int
    size_bytes: int
    pins: int = 0
    users: set[StateKey] = field(default_factory=set)
    """The states of which it is a part."""


@dataclass(slots=True)
class KeptState:
    """A state, which its key names."""

    pieces: tuple[PieceKey, ...]
    position_tokens: int
    block_hashes: tuple[bytes, ...]
    used_s: float
    """Time of the last use, or of the creation."""
    uses: int = 0
    base: StateKey | None = None
    """The state that it extends; None for the beginning of the prompt."""
    own_bytes: int = 0
    """Bytes of pieces that no other state shares."""


class States:
    """The states, and the pieces of each. For one thread at a time."""

    def __init__(self, free: Callable[[PieceKey, int], None]) -> None:
        """Begin empty; ``free`` is called with each piece that goes, and its page."""
        self.pieces: dict[PieceKey, Piece] = {}
        self.by_key: dict[StateKey, KeptState] = {}
        self.order: list[StateKey] = []
        """All states, in arbitrary order, to sample from."""
        self._places: dict[StateKey, int] = {}
        self._at: dict[StateKey, list[StateKey]] = defaultdict(list)
        """States by their last whole block: those that end in or at the end of it."""
        self._free = free

    def add(self, name: StateKey, state: KeptState) -> None:
        """Add a state whose pieces exist."""
        self.by_key[name] = state
        self._places[name] = len(self.order)
        self.order.append(name)
        for key in state.pieces:
            self._join(key, name)
        self._at[_last(name, state)].append(name)
        state.base = self._find_base(state, name)

    def forget(self, name: StateKey) -> None:
        """Drop a state if it exists; pieces that other states share stay."""
        state = self.by_key.pop(name, None)
        if state is None:
            return
        place, last = self._places.pop(name), self.order.pop()
        if last != name:
            self.order[place], self._places[last] = last, place
        at = _last(name, state)
        self._at[at].remove(name)
        if not self._at[at]:
            del self._at[at]
        for key in state.pieces:
            self._leave(key, name)

    def base_tokens(self, name: StateKey) -> int:
        """Return the position of the nearest state that this state extends; 0 if there is none."""
        state = self.by_key[name]
        if state.base and state.base not in self.by_key:
            state.base = self._find_base(state, name)
        return self.by_key[state.base].position_tokens if state.base else 0

    def pin(self, keys: Iterable[PieceKey]) -> None:
        """Keep pieces in place."""
        for key in keys:
            self.pieces[key].pins += 1

    def unpin(self, keys: Iterable[PieceKey]) -> None:
        """Allow pieces to move or go again."""
        for key in keys:
            self.pieces[key].pins -= 1
            self._drop_unused(key)

    def _find_base(self, state: KeptState, name: StateKey) -> StateKey | None:
        """Find the nearest state before this state, by its blocks."""
        for at in (*reversed(state.block_hashes), b""):
            known = [
                (self.by_key[other].position_tokens, other)
                for other in self._at.get(name._replace(hash=at), ())
                if other != name and self.by_key[other].position_tokens < state.position_tokens
            ]
            if known:
                return max(known)[1]
        return None

    def _join(self, key: PieceKey, name: StateKey) -> None:
        piece = self.pieces[key]
        if len(piece.users) == 1:
            self.by_key[next(iter(piece.users))].own_bytes -= piece.size_bytes
        piece.users.add(name)
        if len(piece.users) == 1:
            self.by_key[name].own_bytes += piece.size_bytes

    def _leave(self, key: PieceKey, name: StateKey) -> None:
        piece = self.pieces[key]
        piece.users.discard(name)
        if len(piece.users) == 1:
            self.by_key[next(iter(piece.users))].own_bytes += piece.size_bytes
        self._drop_unused(key)

    def _drop_unused(self, key: PieceKey) -> None:
        piece = self.pieces[key]
        if not piece.users and not piece.pins:
            del self.pieces[key]
            self._free(key, piece.page)


def _last(name: StateKey, state: KeptState) -> StateKey:
    """Return the key of the last whole block; states without a whole block share a salt's key."""
    return name._replace(hash=state.block_hashes[-1] if state.block_hashes else b"")


@dataclass(frozen=True, slots=True)
class Recomputing:
    """Costs of prefilling: ``token_cost`` a token, and ``pair_cost`` a pair of tokens.

    The unit is arbitrary, because only the ratio counts. Attention causes the cost of pairs.
    """

    token_cost: float = 1.0
    pair_cost: float = 0.0

    def cost(self, start_tokens: int, stop_tokens: int) -> float:
        """Return the cost of the tokens between two positions.

        >>> Recomputing(1.0, 0.5).cost(2, 4)
        5.0
        """
        pairs = (stop_tokens**2 - start_tokens**2) / 2
        return self.token_cost * (stop_tokens - start_tokens) + self.pair_cost * pairs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that may be evicted.

    ``cost`` is that of computing it from the nearest kept state before it. ``freed_bytes`` are
    what its eviction frees, without pieces that other states share. It was used ``uses`` times,
    and was last used or made ``age_s`` ago.
    """

    cost: float
    freed_bytes: int
    uses: int
    age_s: float


Worth = Callable[[Candidate], float]


def least_recently_used(state: Candidate) -> float:
    """Value a state by its last use: evict the least recently used first."""
    return -state.age_s


def recomputing_cost(state: Candidate) -> float:
    """Value a state by its recomputing cost a byte: evict what is cheap to compute again first.

    A state is less likely to be wanted the longer ago its last use was, and more likely the more
    often it was used. Costs a byte and uses differ by thousands between states, and predict the
    next use less well than the age, so their square root counts.
    """
    density = state.cost / max(state.freed_bytes, 1)
    return math.sqrt(density * (1 + state.uses)) / (state.age_s + 1)


SAMPLE = 64
"""Number of states that are compared to find the least valuable."""


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
        worth: Worth,
        recomputing: Recomputing,
        changed: Callable[[PieceKey, bool], None] = lambda *_: None,
        seed: int = 0,
    ) -> None:
        """Begin empty; ``worth`` chooses the states to evict.

        ``changed`` is called with each piece that is added (True) or removed.
        """
        self.shape, self.room = shape, room
        self._worth, self._recomputing = worth, recomputing
        self._random = Random(seed)  # noqa: S311 - samples the states to compare
        self._changed = changed
        self._states = States(self._gone)
        self._pieces = self._states.pieces
        self._writing: set[tuple[str, int]] = set()
        """New pages that are not pieces yet."""
        self.evictions = 0

    def __len__(self) -> int:
        """Return the number of kept states."""
        return len(self._states.order)

    def holds(self, prefix: Prefix) -> bool:
        """Return whether all pieces of the state are kept."""
        return not self.missing(prefix)

    def missing(self, prefix: Prefix) -> list[PieceKey]:
        """Return the pieces of a state that are not kept."""
        return self.lacks(_keys(self.shape.pieces(prefix)))

    def lacks(self, keys: Iterable[PieceKey]) -> list[PieceKey]:
        """Return the pieces that are not kept."""
        return [key for key in keys if key not in self._pieces]

    def pin(self, prefix: Prefix, now_s: float) -> Pinned | None:
        """Pin a state and count it as used; None if it is not kept."""
        pinned = self.pin_quietly(prefix)
        if pinned is not None:
            self._use(self._owner(prefix, pinned.held), now_s)
        return pinned

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

    def reserve(self, prefix: Prefix, now_s: float) -> Reserved | None:
        """Find pages for a state of which parts may be kept; None if there is no room.

        The least valuable states are evicted for it, but no pinned states.
        """
        listed = self.shape.pieces(prefix)
        held_tokens = self._held_tokens(listed, prefix)
        held, wanted = self._split(listed, held_tokens)
        counts = Counter(key.group for key in wanted)
        self._states.pin(held)
        moves: list[PageMove] = []
        if not self._make_room(counts, now_s, moves):
            self._states.unpin(held)
            return None
        pages = {group: iter(self.room.take(group, count)) for group, count in counts.items()}
        new = {key: next(pages[key.group]) for key in wanted}
        self._writing.update((key.group, page) for key, page in new.items())
        blocks = {group: [self._page(key, new) for key in keys] for group, keys in listed.items()}
        return Reserved(Pinned(prefix, blocks, held, held_tokens, new), tuple(moves))

    def commit(self, pinned: Pinned, now_s: float) -> None:
        """Keep a state whose new pages are written, and unpin it."""
        prefix, brought = pinned.prefix, []
        for key, page in pinned.new.items():
            self._writing.remove((key.group, page))
            if key in self._pieces:  # another handoff brought this piece meanwhile
                self.room.give(key.group, page)
            else:
                self._pieces[key] = Piece(page, self.room.strides[key.group], pins=1)
                self._changed(key, True)
                brought.append(key)
        if StateKey.of(prefix) not in self._states.by_key:
            self._add(prefix, now_s)
        self._states.unpin((*pinned.held, *brought))

    def give_up(self, pinned: Pinned) -> None:
        """Unpin pages that are no longer read or written; new pages become free."""
        for key, page in pinned.new.items():
            self._writing.remove((key.group, page))
            self.room.give(key.group, page)
        self._states.unpin(pinned.held)

    def forget_revision(self, revision: str) -> None:
        """Drop all states that these weights computed; pinned pieces go when they are unpinned."""
        for name in [key for key in self._states.order if key.revision == revision]:
            self._states.forget(name)

    # -- inside -----------------------------------------------------------------------------------

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

    def _make_room(self, counts: Counter[str], now_s: float, moves: list[PageMove]) -> bool:
        needed = sum(self.room.strides[group] * count for group, count in counts.items())
        if needed > self.room.usable_bytes:
            return False
        while not self.room.can_take(counts):
            # Enough bytes are free, but scattered: move pages together before more is evicted.
            if self.room.free_bytes >= needed + self.room.slab_bytes and self._gather(moves):
                continue
            victim = self._victim(now_s)
            if victim is not None:
                self._evict(victim)
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

    def _victim(self, now_s: float) -> StateKey | None:
        """Return the least valuable of some states that are not pinned; None if all are pinned."""
        sample = self._states.order
        if len(sample) > SAMPLE:
            sample = self._random.sample(sample, SAMPLE)
        best: tuple[float, StateKey] | None = None
        for name in sample:
            state = self._states.by_key[name]
            if self._pinned(name):
                continue
            base = self._states.base_tokens(name)
            cost = self._recomputing.cost(base, state.position_tokens)
            age_s = now_s - state.used_s
            worth = self._worth(Candidate(cost, state.own_bytes, state.uses, age_s))
            if best is None or worth < best[0]:
                best = worth, name
        if best is None and len(self._states.order) > SAMPLE:
            return next((key for key in self._states.order if not self._pinned(key)), None)
        return best and best[1]

    def _pinned(self, name: StateKey) -> bool:
        """Return whether a handoff uses the state: every handoff pins the state's last piece."""
        return self._pieces[self._states.by_key[name].pieces[-1]].pins > 0

    def _evict(self, name: StateKey) -> None:
        self._states.forget(name)
        self.evictions += 1

    def _add(self, prefix: Prefix, now_s: float) -> None:
        keys = tuple(_keys(self.shape.pieces(prefix)))
        state = KeptState(keys, prefix.position_tokens, self.shape.block_hashes(prefix), now_s)
        self._states.add(StateKey.of(prefix), state)

    def _owner(self, prefix: Prefix, keys: tuple[PieceKey, ...]) -> StateKey | None:
        """Return the state to count as used when these pieces are used."""
        name = StateKey.of(prefix)
        if name in self._states.by_key:
            return name
        users = self._pieces[keys[-1]].users
        return max(users, key=lambda user: self._states.by_key[user].used_s, default=None)

    def _use(self, name: StateKey | None, now_s: float) -> None:
        state = self._states.by_key.get(name) if name else None
        if state is not None:
            state.uses, state.used_s = state.uses + 1, now_s

    def _gone(self, key: PieceKey, page: int) -> None:
        self.room.give(key.group, page)
        self._changed(key, False)


def _keys(listed: dict[str, list[PieceKey | None]]) -> Iterator[PieceKey]:
    for keys in listed.values():
        for key in keys:
            if key is not None:
                yield key
