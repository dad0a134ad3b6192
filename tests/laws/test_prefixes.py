"""Laws of prefixes: what is found is what a plain book of all holdings says, whatever happened."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from restow.broker.core.common.actions import TellHoldings
from restow.broker.core.common.events import Batch, Chain, ChainEnd, HashForm, HashRun, Held
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.engines.account import Tenants
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.prefix import index as prefix_index
from restow.broker.core.prefix.index import (
    HASH_BYTES,
    HOLDER_BYTES,
    KEY_BYTES,
    SEGMENT_BYTES,
)
from restow.broker.core.prefix.prefixes import Holders, Prefixes
from restow.broker.core.prefix.rules import (
    SNAPSHOT,
    GroupRule,
    longest,
    rules_of,
    step_of,
)
from restow.broker.errors import (
    ChainFormError,
    EngineReplacedError,
    HoldingsError,
    RestowError,
    WeightsUnknownError,
)
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    LayerSpec,
    ModelSpec,
    ShortConvSpec,
    build_layout,
)
from restow.broker.layout import Field, Kind, Layout, Model, RankLayout, Region, Shard, Span
from restow.broker.layout.values import DType, ModelIdentity

FORM = HashForm("test", 4, 8)
"""Hashes of 8 bytes after every 4 tokens."""
LENGTH = 24
CHAINS = 4


def chain_hashes(number: int, count: int = LENGTH) -> list[bytes]:
    """Return the hashes of chain ``number``; some chains begin alike, and part at some place."""
    parts = [0, 3, 9, 17][number]
    return [
        hashlib.sha256(f"{0 if i < parts or not number else number}:{i}".encode()).digest()[:8]
        for i in range(count)
    ]


def chain_end(number: int, quanta: int) -> bytes:
    """Return the hash of chain ``number`` two tokens behind ``quanta`` quanta."""
    parts = [0, 3, 9, 17][number]
    of = 0 if quanta < parts or not number else number
    return hashlib.sha256(f"{of}:{quanta}:end".encode()).digest()[:8]


def naive(rules: tuple[GroupRule, ...], held: dict[str, set[int]], count: int) -> int:
    """Return the longest state, by the words of the rule: token by token, block by block."""
    for length in range(count, 0, -1):
        if all(_has(rule, held.get(rule.name, set()), length) for rule in rules):
            return length
    return 0


def _has(one: GroupRule, ends: set[int], length: int) -> bool:
    if one.block_quanta == SNAPSHOT:
        return length in ends
    first = length - one.window_quanta if one.window_quanta else 0
    for begin in range(0, length, one.block_quanta):
        end = min(begin + one.block_quanta, length)
        needed = any(quantum >= first for quantum in range(begin, end))
        if needed and end not in ends:
            return False
    return True


def _reaches(one: GroupRule, ends: set[int], quanta: int) -> bool:
    """Return whether all blocks before ``quanta`` are held that a state there needs."""
    if one.block_quanta == SNAPSHOT:
        return True
    first = quanta - one.window_quanta if one.window_quanta else 0
    blocks = range(one.block_quanta, quanta + 1, one.block_quanta)
    return all(end in ends for end in blocks if end > first)


group_rules = st.one_of(
    st.builds(GroupRule, st.sampled_from("abc"), st.just(SNAPSHOT)),
    st.builds(GroupRule, st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 7)),
)


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(group_rules, min_size=1, max_size=3, unique_by=lambda one: one.name),
    st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(1, LENGTH))),
    st.integers(1, LENGTH),
)
def test_the_longest_state_is_the_one_that_the_words_of_the_rule_mean(
    rules: list[GroupRule], held: dict[str, set[int]], count: int
) -> None:
    bits = {name: sum(1 << end - 1 for end in ends if end <= count) for name, ends in held.items()}
    assert longest(rules, bits, count) == naive(tuple(rules), held, count)


@settings(max_examples=300, deadline=None)
@given(group_rules, st.sets(st.integers(1, LENGTH)), st.integers(1, LENGTH))
def test_a_group_reaches_a_place_if_it_holds_the_blocks_before_it(
    rule: GroupRule, ends: set[int], count: int
) -> None:
    held = sum(1 << end - 1 for end in ends)
    assert rule.reaches(held, count) == _reaches(rule, ends, count)


@dataclass
class Told:
    """What the plain book knows of one engine."""

    model: ModelIdentity
    rules: tuple[GroupRule, ...]
    number: int = 0
    held: dict[tuple[str, str], set[bytes]] = field(default_factory=dict)
    """By salt and group."""
    heard: bool = True
    """Whether the broker has all of it."""
    asked: bool = False
    """Whether the broker has asked for all of it again."""


def engine_of(tenant: str, name: str, layout: Layout) -> EngineRecord:
    account = Tenants(Limits()).account(tenant)
    return EngineRecord.of(EngineKey(tenant, name), "life", layout, "digest", 0.0, account)


def layout_of(window_tokens: int, page_tokens: int, name: str = "m", snapshot: bool = False) -> Any:
    """Return a layout with attention, with a window if it has tokens, perhaps with a snapshot."""
    layers: list[LayerSpec] = [AttentionSpec(0, 2, 8, DType.BFLOAT16)]
    if window_tokens:
        layers.append(AttentionSpec(1, 2, 8, DType.BFLOAT16, window_tokens))
    if snapshot:
        layers.append(ShortConvSpec(2, 8, 3, DType.BFLOAT16))
    spec = ModelSpec(name, tuple(layers), revision="v1")
    return build_layout(spec, EngineSettings(tp=1, page_tokens=page_tokens))


LAYOUTS = [
    layout_of(0, 4),
    layout_of(0, 8),
    layout_of(12, 4, "hybrid", snapshot=True),
    layout_of(12, 8, "hybrid", snapshot=True),
]
ENGINES = [
    engine_of(tenant, f"{tenant}{number}", layout)
    for tenant in ("a", "b")
    for number, layout in enumerate(LAYOUTS)
]
MODELS = list(dict.fromkeys(one.layout.model.identity for one in ENGINES))
engines = st.sampled_from(range(len(ENGINES)))
chains = st.integers(0, CHAINS - 1)
salts = st.sampled_from(["", "s"])


class Histories(RuleBasedStateMachine):
    """Engines of two tenants tell, evict, lose batches, go and come again."""

    @initialize(places=st.sampled_from([3, 7, 512]), window=st.sampled_from([1, 5, 4096]))
    def begin(self, places: int, window: int) -> None:
        """Begin with a broker that knows nothing, and with short segments and windows."""
        self.sizes = contextlib.ExitStack()
        for name, size in (("MAX_PLACES", places), ("WINDOW", window)):
            self.sizes.enter_context(patch.object(prefix_index, name, size))
        self.places, self.asked, self.told_again = places, 0, 0
        self.prefixes = Prefixes(Limits(), b"secret")
        self.book = {
            number: Told(one.layout.model.identity, rules_of(one.layout, 4) or ())
            for number, one in enumerate(ENGINES)
        }

    def _say(self, number: int, salt: str, held: list[HashRun], evicted: list[HashRun]) -> None:
        told = self.book[number]
        told.number += 1
        batch = Batch(told.number, FORM, salt, tuple(held), tuple(evicted))
        actions = self.prefixes.hear(ENGINES[number], batch)
        self.told_again += len(actions)
        assert self.prefixes.told_again == self.told_again
        if told.heard:
            assert not actions
        else:  # one before it was lost: nothing counts until batch 1 comes, asked for once
            assert self.prefixes.teller(ENGINES[number].key) is None
            assert actions == ([] if told.asked else [TellHoldings(ENGINES[number].key)])
            told.asked = True
        for run in evicted:
            told.held.get((salt, run.group), set()).difference_update(_split(run.hashes))
        for run in held:
            told.held.setdefault((salt, run.group), set()).update(_split(run.hashes))

    @rule(
        engine=engines,
        chain=chains,
        salt=salts,
        first=st.just(0) | st.integers(0, LENGTH - 1),
        count=st.just(LENGTH) | st.integers(1, LENGTH),
        named=st.booleans(),
        twice=st.booleans(),
    )
    def hold(
        self,
        engine: int,
        chain: int,
        salt: str,
        first: int,
        count: int,
        named: bool,
        twice: bool,
    ) -> None:
        """Let an engine hold a run of a chain in all of its groups, perhaps naming it twice."""
        hashes = chain_hashes(chain)
        parent = hashes[first - 1] if first and named else b""
        run = b"".join(hashes[first : first + count]) * (1 + twice)
        groups = sorted(ENGINES[engine].block_tokens)
        self._say(engine, salt, [HashRun(group, run, parent) for group in groups], [])

    @rule(
        engine=engines,
        chain=chains,
        salt=salts,
        quanta=st.integers(0, 2) | st.integers(0, LENGTH),
        in_all=st.booleans(),
    )
    def hold_an_end(self, engine: int, chain: int, salt: str, quanta: int, in_all: bool) -> None:
        """Let an engine hold a chain's end two tokens behind ``quanta``, in one group or in all."""
        groups = sorted(ENGINES[engine].block_tokens)
        held = [HashRun(group, chain_end(chain, quanta)) for group in groups]
        self._say(engine, salt, held if in_all else held[:1], [])

    @rule(engine=engines, chain=chains, salt=salts, places=st.sets(st.integers(0, LENGTH - 1)))
    def evict(self, engine: int, chain: int, salt: str, places: set[int]) -> None:
        """Let an engine evict blocks of one group, wherever they are."""
        hashes = chain_hashes(chain)
        run = b"".join(hashes[place] for place in sorted(places))
        self._say(engine, salt, [], [HashRun(sorted(ENGINES[engine].block_tokens)[0], run)])

    @rule(engine=engines)
    def lose_a_batch(self, engine: int) -> None:
        """Lose a batch: with the next one the broker forgets all that the engine held."""
        self.book[engine].number += 1
        self.book[engine].heard = False

    @rule(engine=engines)
    def go(self, engine: int) -> None:
        """End an engine's session."""
        self.prefixes.forget(ENGINES[engine].key)
        told = self.book[engine]
        told.number, told.held, told.heard, told.asked = 0, {}, True, False

    @rule(engine=engines, ahead=st.booleans())
    def skip_a_batch(self, engine: int, ahead: bool) -> None:
        """Let a batch come that nobody can read: it counts as received, if it is the next."""
        told = self.book[engine]
        self.prefixes.skip(ENGINES[engine].key, told.number + 1 + ahead)
        if told.number and told.heard and not ahead:
            told.number += 1

    @rule(engine=engines)
    def tell_again(self, engine: int) -> None:
        """Let an engine tell everything again, from batch 1 on."""
        told = self.book[engine]
        before, told.held, told.number = told.held, {}, 0
        told.heard, told.asked = True, False
        self._say(engine, "", [], [])
        for (salt, group), hashes in before.items():
            self._say(engine, salt, [HashRun(group, b"".join(sorted(hashes)))], [])

    @rule()
    def pass_time(self) -> None:
        """Clear what engines held that are gone."""
        self.prefixes.tick()

    @rule(
        tenant=st.sampled_from(("a", "b")),
        model=st.sampled_from(range(len(MODELS))),
        chain=chains,
        salt=salts,
        below_tokens=st.just(0) | st.integers(1, 4 * LENGTH + 4),
    )
    def ask(self, tenant: str, model: int, chain: int, salt: str, below_tokens: int) -> None:
        """Check that the same engines with the same tokens are found as in the book."""
        self._check(tenant, MODELS[model], salt, chain, below_tokens)

    def _ask_for_all(self) -> None:
        for tenant in ("a", "b"):
            for model in MODELS:
                for salt in ("", "s"):
                    for chain in range(CHAINS):
                        self._check(tenant, model, salt, chain, 0)

    def _check(
        self, tenant: str, model: ModelIdentity, salt: str, chain: int, below_tokens: int
    ) -> None:
        hashes = chain_hashes(chain)
        ends = tuple(
            ChainEnd(quanta * FORM.quantum_tokens + 2, chain_end(chain, quanta))
            for quanta in range(LENGTH + 1)
        )
        asked = Chain(model, FORM, salt, b"".join(hashes), below_tokens, ends)
        found = {one.engine: one.tokens for one in self.prefixes.find(tenant, asked)}
        self.asked += 1
        assert all(found.values())
        most = below_tokens or (LENGTH + 1) * FORM.quantum_tokens
        for number, told in self.book.items():
            key = ENGINES[number].key
            if key.tenant != tenant or told.model != model:
                assert key not in found
                continue
            held = {
                group: {place + 1 for place, one in enumerate(hashes) if one in ends}
                for (of_salt, group), ends in told.held.items()
                if of_salt == salt
            }
            count = min(LENGTH, (most - 1) // FORM.quantum_tokens)
            longest_here = naive(told.rules, held, count) * FORM.quantum_tokens
            for position_tokens, hashed in ends:
                quanta = position_tokens // FORM.quantum_tokens
                if position_tokens < most and all(
                    hashed in told.held.get((salt, one.name), ())
                    and _reaches(one, held.get(one.name, set()), quanta)
                    for one in told.rules
                ):
                    longest_here = max(longest_here, position_tokens)
            if told.heard:
                assert found.get(key, 0) == longest_here

    @invariant()
    def counts_what_is_there(self) -> None:
        """Check sizes and counts, and that no holdings are left of an engine that is gone."""
        total_bytes = 0
        assert self.prefixes.asked == self.asked
        for number, told in self.book.items():
            teller = self.prefixes.teller(ENGINES[number].key)
            if teller is not None:
                held = {one.name: 0 for one in told.rules}
                for (_, group), hashes in told.held.items():
                    held[group] += len(hashes)
                holders = self.prefixes.holders[ENGINES[number].key.tenant]
                assert not told.heard or holders.count(teller) == held
        for holders in self.prefixes.holders.values():
            index = holders.index
            total_bytes += index.size_bytes
            segments = index._segments.values()
            assert max(map(len, segments), default=0) <= self.places
            assert index.size_bytes == HASH_BYTES * len(index) + sum(
                SEGMENT_BYTES + KEY_BYTES * len(one) + HOLDER_BYTES * len(one.held)
                for one in segments
            )
            slots = {slot for one in holders.tellers.values() for slot in one.slots.values()}
            assert set(index.counts) <= slots | set(holders.gone)
            assert index.empty == (len(index) == 0) == (index.size_bytes == 0)
            self._check_count(holders)
        assert total_bytes == self.prefixes.size_bytes

    def _check_count(self, holders: Holders) -> None:
        """Check that each hash has a holder, where the book and the broker know the same."""
        tenant = next(iter(holders.tellers), EngineKey("", "")).tenant
        known = [one for number, one in self.book.items() if ENGINES[number].key.tenant == tenant]
        if not tenant or holders.gone or not all(one.heard for one in known):
            return
        distinct = {
            (one.model, salt, hashed)
            for one in known
            for (salt, _), hashes in one.held.items()
            for hashed in hashes
        }
        assert len(holders.index) == len(distinct)

    def teardown(self) -> None:
        """Let engines go, and clear what they held."""
        if not hasattr(self, "sizes"):
            return
        self._ask_for_all()
        for engine in ENGINES:
            self.prefixes.forget(engine.key)
        for _ in range(LENGTH * CHAINS):
            self.prefixes.tick()
        assert not self.prefixes.holders
        assert not self.prefixes.size_bytes
        assert not self.prefixes.forgotten
        self.sizes.close()


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 8] for at in range(0, len(hashes), 8)]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=int(os.environ.get("RESTOW_HISTORIES", "100")),
    stateful_step_count=30,
    deadline=None,
)


def test_what_nobody_holds_any_more_takes_no_room() -> None:
    prefixes = Prefixes(Limits())
    first, second = ENGINES[0], ENGINES[1]
    hashes = chain_hashes(1)
    group = sorted(first.block_tokens)[0]
    for engine in (first, second):
        prefixes.hear(engine, Batch(1, FORM, "", (HashRun(group, b"".join(hashes)),)))
    index = prefixes.holders["a"].index
    prefixes.hear(first, Batch(2, FORM, "", (), (HashRun(group, b"".join(hashes[5:])),)))
    assert len(index) == LENGTH
    before_bytes = index.size_bytes
    prefixes.hear(second, Batch(2, FORM, "", (), (HashRun(group, b"".join(hashes[3:9])),)))
    assert len(index) == LENGTH - 4
    assert index.size_bytes == before_bytes - 4 * HASH_BYTES
    for engine in (first, second):
        prefixes.forget(engine.key)
    while prefixes.holders:
        prefixes.tick()
    assert len(index) == index.size_bytes == prefixes.size_bytes == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(group_rules, max_size=3), max_size=3))
def test_a_search_may_end_where_a_block_ends_in_every_engine(
    engines: list[list[GroupRule]],
) -> None:
    step = step_of(map(tuple, engines))
    whole = [
        [one.block_quanta for one in rules if one.block_quanta and not one.window_quanta]
        for rules in engines
    ]
    if all(whole):  # nobody holds a state behind a key that nobody holds at such a place
        assert step > 0
        assert all(step % min(sizes) == 0 for sizes in whole)
        assert not any(all(less % min(one) == 0 for one in whole) for less in range(1, step))
    else:
        assert step == 0


def test_what_a_layouts_groups_must_hold() -> None:
    hybrid = layout_of(12, 8, "hybrid", snapshot=True)
    by_eight = {"attention": (1, 0), "state": (SNAPSHOT, 0), "window.12": (1, 2)}
    by_four = {"attention": (2, 0), "state": (SNAPSHOT, 0), "window.12": (2, 3)}
    # Blocks of half a quantum: a hash stands for both of them.
    by_sixteen = {"attention": (1, 0), "state": (SNAPSHOT, 0), "window.12": (1, 1)}
    for quantum_tokens, wanted in ((16, by_sixteen), (8, by_eight), (4, by_four)):
        rules = rules_of(hybrid, quantum_tokens) or ()
        assert {one.name: (one.block_quanta, one.window_quanta) for one in rules} == wanted
    assert rules_of(hybrid, 3) is None


@pytest.mark.parametrize(("windows", "quanta"), [((8, 12), 3), ((10, 8), 3), ((0, 12), 0)])
def test_a_group_of_several_windows_needs_the_longest(
    windows: tuple[int, int], quanta: int
) -> None:
    fields = [Field(f"f{w}", Kind.PER_TOKEN, ("byte",), (8,), w) for w in windows]
    shards = [
        Shard(field.name, (Span(0, 8),), DType.UINT8, "pages", 64 * at, (1,), 8)
        for at, field in enumerate(fields)
    ]
    rank = RankLayout(0, (Region("pages", "group", 128, 8),), tuple(shards))
    layout = Layout(Model("m", tuple(fields)), (rank,))
    assert rules_of(layout, 4) == (GroupRule("group", 2, quanta),)


def test_a_group_of_a_draft_alone_is_not_needed() -> None:
    # D's draft may begin cold, so a holder without the draft holds the prefix all the same.
    attention = AttentionSpec(0, 2, 8, DType.BFLOAT16)
    drafts = (replace(attention, layer=1, window_tokens=8),)
    model = ModelSpec("m", (attention,), draft_layers=drafts, draft="mtp", revision="v1")
    engine = engine_of("a", "drafts", build_layout(model, EngineSettings(page_tokens=8)))
    rules = rules_of(engine.layout, 8) or ()
    assert [one.name for one in rules] == ["attention"]
    prefixes, hashes = Prefixes(Limits()), b"".join(chain_hashes(1))
    runs = tuple(HashRun(group, hashes) for group in engine.block_tokens)
    assert len(runs) == 2
    prefixes.hear(engine, Batch(1, FORM, "", runs))
    assert _found(prefixes, "a", engine, hashes) == 4 * LENGTH
    prefixes.hear(engine, Batch(2, FORM, "", (), runs))
    assert _found(prefixes, "a", engine, hashes) == 0


def test_a_tenant_over_its_limit_forgets_its_oldest_and_nobody_elses() -> None:
    prefixes = Prefixes(Limits(tenant_max_holdings_bytes=20_000))
    mine, theirs = ENGINES[0], ENGINES[len(LAYOUTS)]
    group = sorted(mine.block_tokens)[0]
    small = HashRun(group, b"".join(chain_hashes(1)))
    prefixes.hear(theirs, Batch(1, FORM, "", (small,)))
    said = [
        b"".join(hashlib.sha256(b"%d %d" % (chain, i)).digest()[:8] for i in range(20))
        for chain in range(40)
    ]
    for number, hashes in enumerate(said, 1):
        prefixes.hear(mine, Batch(number, FORM, "", (HashRun(group, hashes),)))
        # What is asked for stays, however long ago it was told.
        assert _found(prefixes, "a", mine, said[0]) == 80
    kept = [bool(_found(prefixes, "a", mine, hashes)) for hashes in said]
    assert kept[0]
    assert not kept[1]
    assert sum(kept) < 20
    assert kept[1:] == sorted(kept[1:])
    assert _found(prefixes, "b", theirs, b"".join(chain_hashes(1))) == 96
    assert 0 < prefixes.forgotten == prefixes.holders["a"].forgotten
    assert prefixes.holders["b"].forgotten == 0
    assert prefixes.holders["a"].index.size_bytes <= 20_000


def test_a_tenant_that_others_leave_no_room_forgets_its_own() -> None:
    prefixes = Prefixes(Limits(max_holdings_bytes=5_000))
    first, second = ENGINES[0], ENGINES[len(LAYOUTS)]
    group = sorted(first.block_tokens)[0]
    run = HashRun(group, b"".join(chain_hashes(1)))
    prefixes.hear(first, Batch(1, FORM, "", (run,)))
    for number in (1, 2):
        more = HashRun(group, b"".join(chain_hashes(number)))
        prefixes.hear(second, Batch(number, FORM, "x" * number, (more,)))
    assert _found(prefixes, "a", first, b"".join(chain_hashes(1))) == 96
    assert prefixes.size_bytes <= 5_000


def test_no_question_keeps_others_waiting_however_what_is_held_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_LOOKS", 3 * LENGTH // 2, raising=False)
    prefixes = Prefixes(Limits())
    first, second = ENGINES[0], ENGINES[1]
    hashes, whole = chain_hashes(1), b"".join(chain_hashes(1))
    group = sorted(first.block_tokens)[0]
    runs = tuple(HashRun(group, one) for one in reversed(hashes))  # each lies by itself
    prefixes.hear(first, Batch(1, FORM, "", runs))
    assert _found(prefixes, "a", first, whole) == 4 * LENGTH * 3 // 4
    prefixes.hear(second, Batch(1, FORM, "", (HashRun(group, whole),)))
    assert _found(prefixes, "a", first, whole) == 4 * LENGTH // 2


def _found(prefixes: Prefixes, tenant: str, engine: Any, hashes: bytes) -> int:
    chain = Chain(engine.layout.model.identity, FORM, "", hashes)
    found: list[Held] = prefixes.find(tenant, chain)
    return found[0].tokens if found else 0


def test_a_batch_that_can_not_be_counts_as_received_and_nothing_of_it_is_kept() -> None:
    prefixes, engine = Prefixes(Limits()), ENGINES[0]
    group, hashes = sorted(engine.block_tokens)[0], b"".join(chain_hashes(1))
    good = Batch(1, FORM, "", (HashRun(group, hashes),))
    wrong: dict[str, tuple[type[RestowError], dict[str, Any]]] = {
        "has hashes by": (ChainFormError, {"form": FORM._replace(algorithm="other")}),
        "has no group": (HoldingsError, {"held": (HashRun("nobody's", hashes),)}),
        "has no group .nobody": (HoldingsError, {"evicted": (HashRun("nobody's", hashes),)}),
        "of revision 'v2'": (HoldingsError, {"revision": "v2"}),
    }
    prefixes.hear(engine, good)
    for number, (words, (error, changes)) in enumerate(wrong.items(), 2):
        with pytest.raises(error, match=words):
            prefixes.hear(engine, good._replace(number=number, **changes))
    assert _found(prefixes, "a", engine, hashes) == 4 * LENGTH
    assert prefixes.found == prefixes.asked == 1
    # Of a first batch with a wrong form nothing counts, nor what follows it, and nobody is asked.
    with pytest.raises(ChainFormError, match="does not divide"):
        prefixes.hear(engine, good._replace(form=FORM._replace(quantum_tokens=3)))
    assert prefixes.hear(engine, good._replace(number=2)) == []
    assert _found(prefixes, "a", engine, hashes) == 0
    assert prefixes.found == 1
    assert prefixes.hear(engine, good) == []
    assert prefixes.hear(engine, good._replace(number=3)) == [TellHoldings(engine.key)]


def test_a_question_of_another_form_hears_of_the_form_that_engines_have() -> None:
    prefixes, engine = Prefixes(Limits()), ENGINES[0]
    prefixes.hear(engine, Batch(1, FORM, ""))
    asked = Chain(engine.layout.model.identity, FORM._replace(quantum_tokens=8), "", b"")
    with pytest.raises(ChainFormError, match="they hash by 'test' after every 4 tokens"):
        prefixes.find("a", asked)
    assert prefixes.find("b", asked) == []
    assert prefixes.find("a", asked._replace(model=ModelIdentity("other", "v1"))) == []


def test_what_engines_held_that_are_gone_makes_room_first() -> None:
    prefixes = Prefixes(Limits(max_holdings_bytes=12_000))
    gone, engine = ENGINES[:2]
    group = sorted(gone.block_tokens)[0]
    runs = [
        HashRun(group, b"".join(hashlib.sha256(b"%d %d" % at).digest()[:8] for at in chain))
        for chain in ([(chain, place) for place in range(LENGTH)] for chain in range(6))
    ]
    prefixes.hear(gone, Batch(1, FORM, "", tuple(runs[:3])))
    prefixes.forget(gone.key)
    for number, run in enumerate(runs[3:], 1):
        prefixes.hear(engine, Batch(number, FORM, "", (run,)))
        if number == 1:
            assert len(prefixes.holders["a"].index) == 4 * LENGTH, "there was room enough"
    assert prefixes.size_bytes <= 12_000
    assert not prefixes.forgotten
    for run in runs[3:]:
        assert _found(prefixes, "a", engine, run.hashes) == 4 * LENGTH
    prefixes.forget(engine.key)
    prefixes.tick()
    assert not prefixes.holders


def test_a_prefix_is_shorter_than_it_may_be() -> None:
    prefixes, engine = Prefixes(Limits()), ENGINES[0]
    hashes = b"".join(chain_hashes(1))
    prefixes.hear(engine, Batch(1, FORM, "", (HashRun(sorted(engine.block_tokens)[0], hashes),)))
    chain = Chain(engine.layout.model.identity, FORM, "", hashes)
    for below_tokens, tokens in ((0, 96), (96, 92), (41, 40), (40, 36), (5, 4), (4, 0)):
        found = prefixes.find("a", chain._replace(below_tokens=below_tokens))
        assert [held.tokens for held in found] == [tokens] * (tokens > 0)


def test_an_engine_that_left_is_not_found_beside_those_that_stay() -> None:
    prefixes, hashes = Prefixes(Limits()), b"".join(chain_hashes(1))
    group = sorted(ENGINES[0].block_tokens)[0]
    for engine in ENGINES[:2]:
        prefixes.hear(engine, Batch(1, FORM, "", (HashRun(group, hashes),)))
    asked = Chain(ENGINES[0].layout.model.identity, FORM, "", hashes)
    other_form = asked._replace(form=FORM._replace(quantum_tokens=8))
    prefixes.forget(ENGINES[0].key)
    assert [held.engine for held in prefixes.find("a", asked)] == [ENGINES[1].key]
    with pytest.raises(ChainFormError):
        prefixes.find("a", other_form)
    prefixes.forget(ENGINES[1].key)
    assert prefixes.holders["a"].gone
    assert prefixes.find("a", asked) == prefixes.find("a", other_form) == []


def test_an_engine_that_comes_again_is_asked_again() -> None:
    prefixes, engine = Prefixes(Limits()), ENGINES[0]
    lost = Batch(2, FORM, "")
    assert prefixes.hear(engine, lost) == [TellHoldings(engine.key)]
    assert prefixes.hear(engine, lost) == []
    prefixes.forget(engine.key)
    assert prefixes.hear(engine, lost) == [TellHoldings(engine.key)]


def test_states_of_unknown_weights_or_of_an_engine_that_is_gone_are_not_found() -> None:
    prefixes, hashes = Prefixes(Limits()), b"".join(chain_hashes(1))
    model = replace(ENGINES[0].layout.model, revision="")
    unknown = engine_of("a", "unknown", replace(ENGINES[0].layout, model=model))
    gone = engine_of("a", "gone", ENGINES[0].layout)
    gone.gone = True
    for engine, error in ((unknown, WeightsUnknownError), (gone, EngineReplacedError)):
        run = HashRun(sorted(engine.block_tokens)[0], hashes)
        with pytest.raises(error):
            prefixes.hear(engine, Batch(1, FORM, "", (run,)))
    assert prefixes.find("a", Chain(ENGINES[0].layout.model.identity, FORM, "", hashes)) == []
    with pytest.raises(WeightsUnknownError):
        prefixes.find("a", Chain(model.identity, FORM, "", hashes))
