"""The largest prefix that all groups hold, against the rule said in the plainest way."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.agents.engines.vllm.prefix.match import Match, match

QUANTUM, HASHES = 4, 12
CHAIN = Chain(QUANTUM, tuple(bytes([index]) for index in range(1, HASHES + 1)))
TOKENS = {CHAIN.at(token): token for token in range(QUANTUM, CHAIN.tokens + 1, QUANTUM)}
FULL = Group("full", 8)
COARSE = Group("coarse", 12)
WINDOW = Group("window", 4, window_tokens=9, whole_blocks=True)
STATES = Group("states", 8, scratch_blocks=0)
GROUPS = st.lists(st.sampled_from([FULL, COARSE, WINDOW, STATES]), min_size=1, unique=True)
Held = frozenset[tuple[str, bytes]]
ALL = frozenset(
    (name, one) for name in ("full", "coarse", "window", "states") for one in CHAIN.hashes
)
SOME = st.frozensets(st.sampled_from(sorted(ALL)), max_size=30)
HELD = st.one_of(SOME, SOME.map(lambda missing: ALL - missing))


def held_by(held: Held) -> dict[str, Callable[[bytes], bool]]:
    groups = {name: {one for group, one in held if group == name} for name, _ in ALL}
    return {name: hashes.__contains__ for name, hashes in groups.items()}


def holder_of(group: Group, block: int, upto: int, held: Held) -> bool:
    """Whether a block is held as far as a token, by any name."""
    start = block * group.block_tokens
    return any(
        (group.name, CHAIN.at(token)) in held
        for token in range(max(upto, start + 1), start + group.block_tokens + 1)
        if CHAIN.at(token) is not None
    )


def stands_at(tokens: int, group: Group, held: Held) -> bool:
    if group.is_state:
        return (group.name, CHAIN.at(tokens)) in held
    first = group.first_token(tokens) // group.block_tokens
    count = -(-tokens // group.block_tokens)
    return all(
        holder_of(group, block, min(tokens, (block + 1) * group.block_tokens), held)
        for block in range(first, count)
    )


@given(GROUPS, HELD, st.integers(0, CHAIN.tokens + 9))
@example([FULL, WINDOW], frozenset(("full", one) for one in CHAIN.hashes), 99)
def test_it_is_the_largest_below_the_limit_and_names_every_block(
    groups: list[Group], held: Held, below: int
) -> None:
    found = match(CHAIN, groups, held_by(held), below)
    right = [
        tokens
        for tokens in range(QUANTUM, min(below, CHAIN.tokens + 1), QUANTUM)
        if all(stands_at(tokens, group, held) for group in groups)
    ]
    if not right:
        assert found is None
        return
    assert found is not None
    assert found.tokens == right[-1]
    for group in groups:
        names = found.blocks[group.name]
        if group.is_state:
            assert names == (CHAIN.at(found.tokens),)
            continue
        assert len(names) == -(-found.tokens // group.block_tokens)
        for block, name in enumerate(names):
            needed = (block + 1) * group.block_tokens > group.first_token(found.tokens)
            assert (name is not None) == needed
            if name is not None:
                start = block * group.block_tokens
                assert (group.name, name) in held
                assert min(found.tokens, start + group.block_tokens) <= TOKENS[name]
                assert start < TOKENS[name] <= start + group.block_tokens


def test_a_snapshot_without_its_blocks_and_blocks_without_a_snapshot_are_nothing() -> None:
    def only(name: str) -> Match | None:
        held = frozenset((name, one) for one in CHAIN.hashes)
        return match(CHAIN, [FULL, STATES], held_by(held), 99)

    assert only("full") is None
    assert only("states") is None
