"""Prefixes are named by content alone, and the blocks of a state that all groups hold are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.chained import TOKENS as PROMPT
from engines.chained import prompt
from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import PromptChain, RequestChains, state_blocks
from restow.broker.client import content_of

QUANTUM, HASHES = 4, 12
CHAIN = PromptChain(QUANTUM, tuple(bytes([index]) for index in range(1, HASHES + 1)))
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


@given(GROUPS, HELD, st.integers(0, HASHES))
@example([FULL, WINDOW], ALL, HASHES)
@example([FULL, STATES], frozenset(one for one in ALL if one[0] == "full"), HASHES)
@example([FULL, STATES], frozenset(one for one in ALL if one[0] == "states"), HASHES)
def test_a_state_has_every_block_that_is_needed_and_is_held(
    groups: list[Group], held: Held, quanta: int
) -> None:
    chain = PromptChain(QUANTUM, CHAIN.hashes[:quanta])
    found = state_blocks(chain, groups, held_by(held))
    wanted: dict[str, list[bytes | None]] = {}
    for group in groups:
        # Each block is named by its last token, or by the state's own where the block goes on.
        ends = [chain.tokens] if group.is_state else range(1, chain.tokens + 1)
        wanted[group.name] = [
            chain.at(end) if group.is_state or end > group.first_token(chain.tokens) else None
            for end in ends
            if group.is_state or end % group.block_tokens == 0 or end == chain.tokens
        ]
    names = {(group, name) for group, some in wanted.items() for name in some if name}
    assert found == (wanted if quanta and names <= held else None)


def test_the_state_after_a_single_token_is_found() -> None:
    chain = PromptChain(1, CHAIN.hashes[:1])
    assert state_blocks(chain, [STATES], held_by(ALL)) == {"states": [CHAIN.hashes[0]]}


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
    assert chains.named(b"unknown") is None  # both requests were read to look for it
    chains.end("one")
    assert chains.named(one.block_hashes[1])
    assert chains.named(one.block_hashes[4]) is None
    chains.end("other")
    assert chains.named(one.block_hashes[1]) is None


@pytest.mark.parametrize("size", [8, 16, 32, 48])
def test_each_block_that_the_engine_has_hashed_has_the_name_of_its_content(size: int) -> None:
    tokens = list(range(4 * size))
    chains, request = RequestChains(size), prompt(tokens, size)
    cut = replace(prompt([7, *tokens], size), token_ids=[7, *tokens[: size - 2]])
    for name, one in (("r", request), ("cut", cut)):
        chains.begin(name, one)
    for index, own in enumerate(request.block_hashes, 1):
        named = chains.named(own)
        assert named is not None
        assert (named.token, named.hash) == (index * size, content_of(tokens, index * size))
        for blocks in range(1, 5):
            start = (index - blocks) * size
            before = content_of(tokens, start) if start > 0 else b""
            assert chains.before(named, blocks * size) == before
    # Of a prompt whose end was cut off the engine has hashed more than there is.
    assert chains.named(cut.block_hashes[0]) is None


def test_replies_end_before_and_behind_their_last_tokens_but_not_at_whole_quanta() -> None:
    chains, stop = RequestChains(8), 1000
    tokens = list(range(200))
    for place in (3, *range(23, 120, 8), 120, 150):
        tokens[place] = stop
    chains.begin("r", replace(prompt(tokens), stop_token_ids={stop}))
    early, late = [3, 4], [*range(23, 120, 8), 121, 150, 151]
    for last, ends in ((199, late), (150, [4, *late[:-1]]), (4, early), (3, [3]), (2, [])):
        assert list(chains.ends("r", last)) == [(end, content_of(tokens, end)) for end in ends]
    assert chains.ends("unknown", 199) == ()
