"""`States` are those that a store has, and the pieces that they are made of, each in its page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from restow.agents.store.books.room import PieceKey, StateKey


@dataclass(slots=True)
class Piece:
    """What one page holds. While it has ``pins`` it stays where it is."""

    page: int
    size_bytes: int
    pins: int = 0
    users: set[StateKey] = field(default_factory=set)
    """The states that it is a part of."""


@dataclass(slots=True)
class State:
    """One state, which its key names."""

    pieces: tuple[PieceKey, ...]
    position_tokens: int
    block_hashes: tuple[bytes, ...]
    used_s: float
    """When it was used last, or made."""
    uses: int = 0
    base: StateKey | None = None
    """A state that it goes on from; None: the prompt's beginning."""
    own_bytes: int = 0
    """Of pieces that no other state has."""


class States:
    """Which states there are, and the pieces of each. One thread at a time."""

    def __init__(self, free: Callable[[PieceKey, int], None]) -> None:
        """Have none; ``free`` is called with each piece that goes, and its page."""
        self.pieces: dict[PieceKey, Piece] = {}
        self.by_key: dict[StateKey, State] = {}
        self.order: list[StateKey] = []
        """All of them, in no order, to draw from."""
        self._places: dict[StateKey, int] = {}
        self._at: dict[StateKey, list[StateKey]] = defaultdict(list)
        """By the last whole block: the states that stand in or at the end of it."""
        self._free = free

    def add(self, name: StateKey, state: State) -> None:
        """Have a state, whose pieces are there."""
        self.by_key[name] = state
        self._places[name] = len(self.order)
        self.order.append(name)
        for key in state.pieces:
            self._join(key, name)
        self._at[_last(name, state)].append(name)
        state.base = self._find_base(state, name)

    def forget(self, name: StateKey) -> None:
        """Drop a state, if it is there; pieces that others have stay."""
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
        """Where the nearest state stands that one goes on from; 0: there is none."""
        state = self.by_key[name]
        if state.base and state.base not in self.by_key:
            state.base = self._find_base(state, name)
        return self.by_key[state.base].position_tokens if state.base else 0

    def pin(self, keys: Iterable[PieceKey]) -> None:
        """Have pieces stay where they are."""
        for key in keys:
            self.pieces[key].pins += 1

    def unpin(self, keys: Iterable[PieceKey]) -> None:
        """They may move or go again."""
        for key in keys:
            self.pieces[key].pins -= 1
            self._drop_unused(key)

    def _find_base(self, state: State, name: StateKey) -> StateKey | None:
        """Find the nearest state before it, by the blocks that it is made of."""
        for at in (*reversed(state.block_hashes), b""):
            known = [
                (self.by_key[one].position_tokens, one)
                for one in self._at.get(name._replace(hash=at), ())
                if one != name and self.by_key[one].position_tokens < state.position_tokens
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
    """Its last whole block; before the first one all states of a salt are in one place."""
    return name._replace(hash=state.block_hashes[-1] if state.block_hashes else b"")
