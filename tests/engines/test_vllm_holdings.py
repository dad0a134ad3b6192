"""What is told of a cache: once, when it is so, and no more when it is not."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.prefix.holdings import Changes, Evicted, Held, Holdings
from restow.agents.engines.vllm.prefix.request_chains import RequestChains
from restow.broker.client import content_of

GROUPS = {0: Group("full", 8), 1: Group("states", 16, scratch_blocks=0)}
FULL, STATES = (group.to_bytes(4, "big") for group in GROUPS)
NUMBERS = count()


def a_request(tokens: list[int], block_tokens: int = 8, **more: Any) -> Any:
    """What is read of a vLLM request; its block hashes stand for tokens and salt."""
    salt = more.get("cache_salt") or ""
    hashes = [
        b"own" + content_of(tokens, end, salt=salt)
        for end in range(block_tokens, len(tokens) + 1, block_tokens)
    ]
    return SimpleNamespace(
        request_id=f"r{next(NUMBERS)}",
        _all_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        block_hashes=hashes,
        mm_features=[],
        **{
            "prompt_embeds": None,
            "resumable": False,
            "kv_transfer_params": None,
            "cache_salt": None,
            **more,
        },
    )


class Cache:
    """Keys that are cached, and who tells of them."""

    def __init__(self) -> None:
        self.chains = RequestChains(8)
        self.holdings = Holdings(GROUPS, self.chains.named, self.chains.before)
        self.cached: set[bytes] = set()

    def has(self, *keys: bytes) -> None:
        """Cache these, and evict all else."""
        touched = self.cached ^ set(keys)
        self.cached = set(keys)
        self.holdings.changed(
            sorted(touched, key=[*keys, *touched].index), self.cached.__contains__
        )


TOKENS = list(range(40))


def test_blocks_of_a_chain_are_told_as_one_run_and_evicted_by_their_hashes() -> None:
    cache, request = Cache(), a_request(TOKENS)
    cache.chains.begin(request, "")
    names = [content_of(TOKENS, end) for end in range(8, 41, 8)]
    own = request.block_hashes
    cache.has(*(one + FULL for one in own[:3]))
    assert cache.holdings.changes() == Changes((), (Held("full", tuple(names[:3])),))
    assert cache.holdings.changes() == Changes()
    cache.has(*(one + FULL for one in own), own[1] + STATES, own[4] + STATES)
    assert cache.holdings.changes() == Changes(
        (),
        (
            Held("full", tuple(names[3:]), names[2]),
            Held("states", (names[1],)),
            Held("states", (names[4],)),
        ),
    )
    cache.has(*(one + FULL for one in own[:4]))
    changes = cache.holdings.changes()
    assert changes.held == ()
    assert {(one.group, frozenset(one.hashes)) for one in changes.evicted} == {
        ("full", frozenset(names[4:])),
        ("states", frozenset((names[1], names[4]))),
    }


def test_a_block_that_is_filled_in_part_is_a_run_of_its_own() -> None:
    chains = RequestChains(8)
    holdings = Holdings({0: Group("full", 16)}, chains.named, chains.before)
    request = a_request(TOKENS)
    chains.begin(request, "")
    keys = [request.block_hashes[at] + FULL for at in (1, 2)]
    holdings.changed(keys, set(keys).__contains__)
    assert holdings.changes().held == (
        Held("full", (content_of(TOKENS, 16),)),
        Held("full", (content_of(TOKENS, 24),)),
    )


def test_what_came_and_went_or_went_and_came_is_not_told() -> None:
    cache, request = Cache(), a_request(TOKENS)
    cache.chains.begin(request, "")
    key, other = (one + FULL for one in request.block_hashes[:2])
    cache.has(key)
    assert cache.holdings.changes() != Changes()
    cache.has(key, other)
    cache.has()
    cache.has(key)
    assert cache.holdings.changes() == Changes()


def test_all_that_is_cleared_is_evicted_and_may_come_again() -> None:
    cache, request = Cache(), a_request(TOKENS)
    cache.chains.begin(request, "")
    keys = [one + FULL for one in request.block_hashes]
    names = [content_of(TOKENS, end) for end in range(8, 41, 8)]
    cache.has(*keys)
    assert cache.holdings.changes().held == (Held("full", tuple(names)),)
    cache.holdings.cleared()
    cache.cached.clear()
    assert cache.holdings.count() == {"full": 0, "states": 0}
    cache.has(*keys[:2])
    changes = cache.holdings.changes()
    assert changes.held == ()
    assert [(one.group, set(one.hashes)) for one in changes.evicted] == [("full", {*names[2:]})]


def test_a_place_with_two_keys_is_held_until_both_are_gone() -> None:
    """As where one adapter's weights were loaded under two names."""
    cache = Cache()
    one, other = a_request(TOKENS[:8]), a_request(TOKENS[:8])
    other.block_hashes = [b"another's name"]
    for request in (one, other):
        cache.chains.begin(request, "the same weights")
    name = content_of(TOKENS, 8, adapter="the same weights")
    keys = [request.block_hashes[0] + FULL for request in (one, other)]
    cache.has(*keys)
    assert cache.holdings.changes().held == (Held("full", (name,)),)
    assert cache.holdings.keys("full") == {name: tuple(keys)}
    cache.has(keys[1])
    assert cache.holdings.changes() == Changes()
    cache.has()
    assert cache.holdings.changes() == Changes((Evicted("full", (name,)),))


@given(st.lists(st.frozensets(st.integers(0, 9)), max_size=8))
def test_changes_add_up_to_what_is_cached(histories: list[set[int]]) -> None:
    cache, request = Cache(), a_request(list(range(80)))
    cache.chains.begin(request, "")
    told: set[bytes] = set()
    for cached in histories:
        cache.has(*(request.block_hashes[index] + FULL for index in sorted(cached)))
        changes = cache.holdings.changes()
        gone = {name for one in changes.evicted for name in one.hashes}
        come = {name for one in changes.held for name in one.hashes}
        assert gone <= told
        assert not come & told
        told = told - gone | come
        assert told == {content_of(list(range(80)), 8 * index + 8) for index in cached}


# -- whose content a hash of vLLM's stands for -----------------------------------------------------


def test_engines_of_other_block_sizes_ask_by_the_same_chain() -> None:
    tokens = list(range(2000))
    chains = []
    for block_tokens in (16, 400, 528):
        here = RequestChains(block_tokens)
        request = a_request(tokens, block_tokens)
        here.begin(request, "")
        chains.append(here.chain(request.request_id))
    assert chains[0] is not None
    assert chains[0] == chains[1] == chains[2]
    assert chains[0].at(400) == content_of(tokens, 400)
    assert chains[0].tokens == 2000


def test_salts_and_adapters_keep_prompts_apart() -> None:
    names = set()
    for adapter, salt in (("", None), ("a", None), ("", "s"), ("a", "s")):
        chains = RequestChains(8)
        request = a_request(TOKENS, cache_salt=salt)
        chains.begin(request, adapter)
        named = chains.named(request.block_hashes[0])
        assert named is not None
        names.add(named.hash)
    assert len(names) == 4


def test_a_reply_is_named_as_it_grows() -> None:
    chains, request = RequestChains(8), a_request(TOKENS[:8])
    chains.begin(request, "")
    assert chains.named(request.block_hashes[0])
    grown = a_request(TOKENS)
    assert chains.named(grown.block_hashes[4]) is None
    request._all_token_ids += TOKENS[8:]
    request.block_hashes += grown.block_hashes[1:]
    named = chains.named(request.block_hashes[4])
    assert named is not None
    assert named.token == 40
    assert named.hash == content_of(TOKENS, 40)
    assert chains.before(named, 16) == content_of(TOKENS, 24)


def test_the_last_block_of_a_prompt_that_was_cut_is_not_named() -> None:
    """vLLM hashed it with the token that was cut off, and then another one takes its place."""
    chains, request = RequestChains(8), a_request(TOKENS[:16])
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.kv_transfer_params = {"_p_side_truncated": True}
    chains.begin(request, "")
    request._all_token_ids.append(99)
    assert chains.named(request.block_hashes[0])
    assert chains.named(request.block_hashes[1]) is None


def test_what_has_no_chain_is_never_named() -> None:
    for more in ({"prompt_embeds": object()}, {"resumable": True}):
        chains, request = RequestChains(8), a_request(TOKENS, **more)
        chains.begin(request, "")
        assert chains.chain(request.request_id) is None
        assert chains.named(request.block_hashes[0]) is None


def test_names_stay_as_long_as_any_request_has_them_and_no_longer() -> None:
    chains = RequestChains(8)
    one, other = a_request(TOKENS), a_request(TOKENS[:16])
    for request in (one, other):
        chains.begin(request, "")
        assert chains.named(request.block_hashes[1])
    chains.end(one.request_id)
    assert chains.named(one.block_hashes[1])
    assert chains.named(one.block_hashes[4]) is None
    chains.end(other.request_id)
    assert chains.named(one.block_hashes[1]) is None
    assert not chains._named
    assert not chains._uses
