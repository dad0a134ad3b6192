"""The states of a store, and the pieces in pages of which they consist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from restow.agents.store.books.room import PieceKey, StateKey


@dataclass(slots=True)
class Piece:
    """The content of a page, which stays in place while it has ``pins``."""

    page: int
    size_bytes: int
    pins: int = 0
    users: set[StateKey] = field(default_factory=set)
    """The states of which it is a part."""


@dataclass(slots=True)
class State:
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
        self.by_key: dict[StateKey, State] = {}
        self.order: list[StateKey] = []
        """All states, in arbitrary order, to sample from."""
        self._places: dict[StateKey, int] = {}
        self._at: dict[StateKey, list[StateKey]] = defaultdict(list)
        """States by their last whole block: those that end in or at the end of it."""
        self._free = free

    def add(self, name: StateKey, state: State) -> None:
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
        """Return the position of the nearest state that this one extends; 0 if there is none."""
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

    def _find_base(self, state: State, name: StateKey) -> StateKey | None:
        """Find the nearest state before this one, by its blocks."""
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


def _last(name: StateKey, state: State) -> StateKey:
    """Return the key of the last whole block; states without one share one key a salt."""
    return name._replace(hash=state.block_hashes[-1] if state.block_hashes else b"")
