"""Which tokens of loaded blocks no handoff writes: their bytes are zeroed, not left as they were.

vLLM leaves the blocks of groups that a connector loads to the connector. What lay in them may be
another layer's state, which read as keys and values can be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restow.agents.engines.common.groups import NULL_BLOCK, Group


@dataclass(frozen=True, slots=True)
class Hole:
    """Tokens ``[start, stop)`` of a block, counted from the block's first."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Holes by group name; groups of states have none (their padding is scratch in the layout)."""

    holes: Mapping[str, tuple[Hole, ...]]


def unwritten(
    groups: Sequence[Group],
    windows: Mapping[str, int],
    blocks: Mapping[str, Sequence[int]],
    held_tokens: int,
    position_tokens: int,
) -> Unwritten:
    """What a handoff up to ``position_tokens`` leaves out of D's blocks.

    Tokens before ``held_tokens`` are D's own. ``windows`` are the tokens that the groups with a
    sliding window keep; what lies before is not moved.
    """
    found: dict[str, tuple[Hole, ...]] = {}
    for group in groups:
        if group.is_state:
            continue
        window = windows.get(group.name, 0)
        first = max(position_tokens - window, 0) if window else 0
        holes = []
        for index, block in enumerate(blocks[group.name]):
            begin = index * group.block_tokens
            end = begin + group.block_tokens
            if block == NULL_BLOCK or end <= held_tokens:
                continue
            for start, stop in ((max(begin, held_tokens), first), (position_tokens, end)):
                start, stop = max(start, begin), min(stop, end)
                if start < stop:
                    holes.append(Hole(block, start - begin, stop - begin))
        found[group.name] = tuple(holes)
    return Unwritten(found)
