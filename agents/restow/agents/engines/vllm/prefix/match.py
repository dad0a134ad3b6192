"""`match` finds the largest prefix of a chain that all groups of an engine hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.chain import Chain

Holds = Callable[[bytes], bool]
"""Whether a group has something of the tokens that a hash names."""


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix of ``tokens``, and by group the hash of each of its blocks.

    None: the group needs no block there, before a window. Of states there is one.
    """

    tokens: int
    blocks: dict[str, tuple[bytes | None, ...]]


def match(
    chain: Chain, groups: Sequence[Group], holds: Mapping[str, Holds], below_tokens: int
) -> Match | None:
    """Return the largest prefix that ends below a token; None where there is none.

    All blocks of attention, of a window the last ones, and a snapshot at the very end.
    """
    held = [_Blocks(group, chain, holds[group.name]) for group in groups if not group.is_state]
    states = [group for group in groups if group.is_state]
    last = min([chain.tokens, below_tokens - 1, *(one.end for one in held)])
    for tokens in range(last - last % chain.quantum_tokens, 0, -chain.quantum_tokens):
        name = chain.at(tokens)
        if name is None or not all(holds[group.name](name) for group in states):
            continue
        if all(one.covers(tokens) for one in held):
            blocks = {one.group.name: tuple(one.needed(tokens)) for one in held}
            return Match(tokens, blocks | {group.name: (name,) for group in states})
    return None


class _Blocks:
    """Which hash stands for each block of a chain that a group of tokens holds."""

    def __init__(self, group: Group, chain: Chain, holds: Holds) -> None:
        self.group = group
        size = group.block_tokens
        self._found: list[tuple[int, bytes] | None] = []
        """By block: up to which token it is filled, and by which hash it is held."""
        self._first: list[int] = []
        """By block: where those begin that are held without a gap up to it."""
        quanta, odd = divmod(size, chain.quantum_tokens)
        ends = () if odd else chain.hashes[quanta - 1 :: quanta]
        first = 0
        for index, start in enumerate(range(0, chain.tokens, size)):
            if index < len(ends) and holds(ends[index]):
                found: tuple[int, bytes] | None = (start + size, ends[index])
            else:
                found = _filled_furthest(chain, holds, start, start + size)
            if found is None:
                if not group.window_tokens:
                    break
                first = index + 1
            self._found.append(found)
            self._first.append(first)
            if found is not None and found[0] < start + size:
                first = index + 1
        self.end = max((found[0] for found in self._found if found), default=0)

    def covers(self, tokens: int) -> bool:
        """Whether all is held that a state after so many tokens needs."""
        last = (tokens - 1) // self.group.block_tokens
        found = self._found[last] if last < len(self._found) else None
        return found is not None and found[0] >= tokens and self._first[last] <= self._from(tokens)

    def needed(self, tokens: int) -> Iterator[bytes | None]:
        """Yield the hashes of the blocks that hold the first tokens."""
        for index in range((tokens - 1) // self.group.block_tokens + 1):
            found = self._found[index] if index >= self._from(tokens) else None
            yield None if found is None else found[1]

    def _from(self, tokens: int) -> int:
        return self.group.first_token(tokens) // self.group.block_tokens


def _filled_furthest(chain: Chain, holds: Holds, start: int, end: int) -> tuple[int, bytes] | None:
    """The furthest token of a block that a hash of the chain is held for."""
    for token in range(min(end, chain.tokens), start, -chain.quantum_tokens):
        name = chain.at(token)
        if name is not None and holds(name):
            return token, name
    return None
