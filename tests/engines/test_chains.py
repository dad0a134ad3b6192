"""Prefixes are named by content alone, and the largest one that all groups hold is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from hypothesis import example, given
from hypothesis import strategies as st

from engines.chained import TOKENS as PROMPT
from engines.chained import prompt
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import (
    PrefixMatch,
    PromptChain,
    RequestChains,
    longest_prefix,
)
from restow.broker.client import content_of

QUANTUM, HASHES = 4, 12
CHAIN = PromptChain(QUANTUM, tuple(bytes([index]) for index in range(1, HASHES + 1)))
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
    """Return whether a block is held as far as a token, by any name."""
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
    found = longest_prefix(CHAIN, groups, held_by(held), below)
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
    def only(name: str) -> PrefixMatch | None:
        held = frozenset((name, one) for one in CHAIN.hashes)
        return longest_prefix(CHAIN, [FULL, STATES], held_by(held), 99)

    assert only("full") is None
    assert only("states") is None


def test_engines_of_other_block_sizes_ask_by_the_same_chain() -> None:
    tokens = list(range(2000))
    chains = []
    for block_tokens in (16, 400, 528):
        here = RequestChains(block_tokens)
        request = prompt(tokens, block_tokens)
        here.begin("r", request)
        chains.append(here.chain("r"))
    assert chains[0] is not None
    assert chains[0] == chains[1] == chains[2]
    assert chains[0].at(400) == content_of(tokens, 400)
    assert chains[0].tokens == 2000


def test_salts_and_adapters_keep_prompts_apart() -> None:
    names = set()
    for adapter, salt in (("", ""), ("a", ""), ("", "s"), ("a", "s")):
        chains = RequestChains(8)
        request = prompt(PROMPT, adapter=adapter, salt=salt)
        chains.begin("r", request)
        named = chains.named(request.block_hashes[0])
        assert named is not None
        names.add(named.hash)
    assert len(names) == 4


def test_a_reply_is_named_as_it_grows() -> None:
    chains, request = RequestChains(8), prompt(PROMPT[:8])
    chains.begin("r", request)
    assert chains.named(request.block_hashes[0])
    grown = prompt(PROMPT)
    assert chains.named(grown.block_hashes[4]) is None
    cast("list[int]", request.token_ids).extend(PROMPT[8:])
    cast("list[bytes]", request.block_hashes).extend(grown.block_hashes[1:])
    named = chains.named(request.block_hashes[4])
    assert named is not None
    assert named.token == 40
    assert named.hash == content_of(PROMPT, 40)
    assert chains.before(named, 16) == content_of(PROMPT, 24)


def test_the_last_block_of_a_prompt_that_was_cut_is_not_named() -> None:
    # The engine hashed the block with the token that was cut off, whose place another token takes.
    chains, request = RequestChains(8), replace(prompt(PROMPT[:16]), limit_tokens=15)
    cast("list[int]", request.token_ids)[-1] = 99
    chains.begin("r", request)
    assert chains.named(request.block_hashes[0])
    assert chains.named(request.block_hashes[1]) is None


def test_names_stay_as_long_as_any_request_has_them_and_no_longer() -> None:
    chains = RequestChains(8)
    one, other = prompt(PROMPT), prompt(PROMPT[:16])
    for name, request in (("one", one), ("other", other)):
        chains.begin(name, request)
        assert chains.named(request.block_hashes[1])
    chains.end("one")
    assert chains.named(one.block_hashes[1])
    assert chains.named(one.block_hashes[4]) is None
    chains.end("other")
    assert chains.named(one.block_hashes[1]) is None
