"""`States` are those that a store has, and the pieces that they are made of, each in its page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from restow.agents.store.shape import PieceKey


@dataclass(slots=True)
class Piece:
    """What one page holds. While it has ``pins`` it stays where it is."""

    page: int
    size_bytes: int
    pins: int = 0
    users: set[bytes] = field(default_factory=set)
    """The states that it is a part of."""


@dataclass(slots=True)
class State:
    """One state, by whose content it is known."""

    pieces: tuple[PieceKey, ...]
    position_tokens: int
    block_hashes: tuple[bytes, ...]
    used_s: float
    """When it was used last, or made."""
    uses: int = 0
    base: bytes = b""
    """A state that it goes on from; "": the prompt's beginning."""
    own_bytes: int = 0
    """Of pieces that no other state has."""


class States:
    """Which states there are, and the pieces of each. One thread at a time."""

    def __init__(self, free: Callable[[str, int], None]) -> None:
        """Have none; ``free`` is called with the group and page of each piece that goes."""
        self.pieces: dict[PieceKey, Piece] = {}
        self.by_content: dict[bytes, State] = {}
        self.order: list[bytes] = []
        """All of them, in no order, to draw from."""
        self._places: dict[bytes, int] = {}
        self._at: dict[bytes, list[bytes]] = defaultdict(list)
        """By the hash of the last whole block: the states that stand in or at the end of it."""
        self._free = free

    def add(self, content: bytes, state: State) -> None:
        """Have a state, whose pieces are there."""
        self.by_content[content] = state
        self._places[content] = len(self.order)
        self.order.append(content)
        for key in state.pieces:
            self._join(key, content)
        self._at[_last(state.block_hashes)].append(content)
        state.base = self._find_base(state, content)

    def forget(self, content: bytes) -> None:
        """Drop a state, if it is there; pieces that others have stay."""
        state = self.by_content.pop(content, None)
        if state is None:
            return
        place, last = self._places.pop(content), self.order.pop()
        if last != content:
            self.order[place], self._places[last] = last, place
        at = _last(state.block_hashes)
        self._at[at].remove(content)
        if not self._at[at]:
            del self._at[at]
        for key in state.pieces:
            self._leave(key, content)

    def base_tokens(self, content: bytes) -> int:
        """Where the nearest state stands that one goes on from; 0: there is none."""
        state = self.by_content[content]
        if state.base and state.base not in self.by_content:
            state.base = self._find_base(state, content)
        return self.by_content[state.base].position_tokens if state.base else 0

    def pin(self, keys: Iterable[PieceKey]) -> None:
        """Have pieces stay where they are."""
        for key in keys:
            self.pieces[key].pins += 1

    def unpin(self, keys: Iterable[PieceKey]) -> None:
        """They may move or go again."""
        for key in keys:
            self.pieces[key].pins -= 1
            self._drop_unused(key)

    def _find_base(self, state: State, content: bytes) -> bytes:
        """Find the nearest state before it, by the blocks that it is made of."""
        for at in (*reversed(state.block_hashes), b""):
            known = [
                (self.by_content[one].position_tokens, one)
                for one in self._at.get(at, ())
                if one != content and self.by_content[one].position_tokens < state.position_tokens
            ]
            if known:
                return max(known)[1]
        return b""

    def _join(self, key: PieceKey, content: bytes) -> None:
        piece = self.pieces[key]
        if len(piece.users) == 1:
            self.by_content[next(iter(piece.users))].own_bytes -= piece.size_bytes
        piece.users.add(content)
        if len(piece.users) == 1:
            self.by_content[content].own_bytes += piece.size_bytes

    def _leave(self, key: PieceKey, content: bytes) -> None:
        piece = self.pieces[key]
        piece.users.discard(content)
        if len(piece.users) == 1:
            self.by_content[next(iter(piece.users))].own_bytes += piece.size_bytes
        self._drop_unused(key)

    def _drop_unused(self, key: PieceKey) -> None:
        piece = self.pieces[key]
        if not piece.users and not piece.pins:
            del self.pieces[key]
            self._free(key[0], piece.page)


def _last(hashes: tuple[bytes, ...]) -> bytes:
    return hashes[-1] if hashes else b""
