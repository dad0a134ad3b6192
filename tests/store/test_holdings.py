"""What a store tells is what it has, in memory or on its disk, and what is found by it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from restow.agents.store.holdings import StoredStates, StoreMemory
from restow.agents.store.kept import Pinned, Recomputing
from restow.agents.store.room import PieceKey, Room, Shape, StateKey, in_room
from restow.agents.store.run_files import RunLostError
from restow.agents.store.shelf import Shelf
from restow.broker.client import HashForm, Prefix, PrefixChain, chain_of
from restow.broker.core.prefix.rules import longest, rules_of
from restow.broker.errors import ChainFormError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.layout.store_layout import store_layout

BF16 = DType.BFLOAT16
ATTENTION, MAMBA = AttentionSpec(1, 4, 8, BF16), Mamba2Spec(0, 8, 4, 16, 4, 4, BF16, BF16)
WINDOW = AttentionSpec(2, 4, 8, BF16, window_tokens=8)
LAYERS = {
    "attention": (ATTENTION,),
    "hybrid": (ATTENTION, MAMBA),
    "windows": (ATTENTION, WINDOW),
    "all": (ATTENTION, WINDOW, MAMBA),
}
BLOCK = 4


def layout_of(name: str) -> Layout:
    spec = ModelSpec(name, LAYERS[name], revision="v1")
    return in_room(store_layout(build_layout(spec, EngineSettings(page_tokens=BLOCK)), BLOCK))


class Told:
    """What was told to be held, and not yet to be gone."""

    def __init__(self) -> None:
        self.keys: set[PieceKey] = set()

    def hold(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        self.keys |= {PieceKey(group, salt, one, revision) for one in hashes}

    def evict(
        self, form: HashForm, group: str, hashes: Iterable[bytes], *, salt: str, revision: str
    ) -> None:
        self.keys -= {PieceKey(group, salt, one, revision) for one in hashes}


class House:
    """A store without a session: its holdings, its disk, and what it told."""

    def __init__(self, name: str, folder: Path, size_bytes: int = 1 << 17) -> None:
        self.layout = layout_of(name)
        shape = Shape.of(self.layout)
        room = Room(shape.page_bytes, size_bytes)
        self.memory, self.told = StoreMemory(room), Told()
        self.shelf = Shelf(folder, self.layout, room.strides, 1 << 18)
        given = shape, room, self.memory, Recomputing(), self.shelf, self.told
        self.holdings = StoredStates(*given)

    def keep(self, prefix: Prefix) -> bool:
        pinned = self.holdings.reserve(prefix)
        if pinned is not None:
            self.holdings.commit(pinned)
        return pinned is not None

    def write(self, pinned: Pinned) -> None:
        self.shelf.write(pinned.prefix.form, self.holdings.pages(pinned.pages()))

    def is_found(self, chain: PrefixChain, position: int) -> bool:
        """Return whether a broker would find the state at ``position``, by what was told."""
        rules = rules_of(self.layout, chain.form.quantum_tokens)
        assert rules is not None
        count, rest = divmod(position, chain.form.quantum_tokens)
        held = {
            rule.name: sum(
                1 << place
                for place, one in enumerate(chain.hashes[:count])
                if PieceKey(rule.name, chain.salt, one) in self.told.keys
            )
            for rule in rules
        }
        if not rest:
            return longest(rules, held, count) == count
        end = dict(chain.ends)[position]
        at_end = all(PieceKey(rule.name, chain.salt, end) in self.told.keys for rule in rules)
        return at_end and all(rule.reaches(held.get(rule.name, 0), count) for rule in rules)

    def close(self) -> None:
        self.shelf.close()
        self.memory.close()


@contextmanager
def opened(name: str, folder: Path, size_bytes: int = 1 << 17) -> Iterator[House]:
    house = House(name, folder, size_bytes)
    try:
        yield house
    finally:
        house.close()


def chains(random: Random, quantum_tokens: int) -> list[PrefixChain]:
    """Return the chains of a tree of prompts; at each token a state may stand."""
    texts = [[random.randrange(99)] * random.randrange(1, 9) for _ in range(3)]
    for _ in range(30):
        begin = random.choice(texts)
        texts.append([*begin, *(random.randrange(99) for _ in range(random.randrange(1, 9)))][:40])
    return [
        chain_of(
            text,
            quantum_tokens,
            ends_tokens=[one for one in range(1, len(text) + 1) if one % quantum_tokens],
        )
        for text in texts
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quantum_tokens", [1, 2, BLOCK])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_told_is_what_is_there_and_what_is_found_is_held(
    name: str, quantum_tokens: int, seed: int, tmp_path: Path
) -> None:
    random = Random(f"{name} {quantum_tokens} {seed}")  # noqa: S311
    some = chains(random, quantum_tokens)
    met = {True: 0, False: 0}
    with opened(name, tmp_path) as house:
        pinned: list[Pinned] = []
        kept: list[Prefix] = []
        for _ in range(120):
            chain = random.choice(some)
            prefix = chain.prefix(random.randrange(1, chain.below_tokens + 1))
            match random.randrange(5):
                case 0 | 1 if house.keep(prefix):
                    kept.append(prefix)
                case 2 if kept and (there := house.holdings.pin_quietly(random.choice(kept[-4:]))):
                    pinned.append(there)
                    house.write(there)
                case 3 if pinned:
                    house.holdings.give_up(pinned.pop())
                case 4 if len(house.shelf) > 3:
                    house.shelf._drop(next(iter(house.shelf._runs.by_number)))
            missing = {*house.holdings._kept.lacks(house.told.keys)}
            assert missing <= {*house.shelf.pieces}, "told, and nowhere"
            assert {*house.shelf.pieces} <= house.told.keys, "on the disk, and not told"
            assert {*house.holdings._kept._pieces} <= house.told.keys, "in memory, and not told"
        for chain in some:
            for position in range(1, chain.below_tokens + 1):
                held = house.holdings.holds(chain.prefix(position))
                assert house.is_found(chain, position) == held
                met[held] += 1
        on_disk = {*house.shelf.pieces}
        for one in pinned:
            house.holdings.give_up(one)
    assert all(met.values())
    with opened(name, tmp_path) as again:
        again.holdings.tell_everything()
        assert again.told.keys == on_disk
        assert again.holdings.form == some[0].form


def test_what_a_disk_lost_is_told_to_be_gone_unless_memory_has_it(tmp_path: Path) -> None:
    chain = chain_of(range(40), BLOCK)
    with opened("hybrid", tmp_path) as house:
        states = [chain.prefix(8), chain.prefix(16)]
        for prefix in states:
            assert house.keep(prefix)
            there = house.holdings.pin_quietly(prefix)
            assert there is not None
            house.write(there)
            house.holdings.give_up(there)
        everything = set(house.told.keys)
        house.holdings._kept._states.forget(StateKey.of(states[1]))
        for path in tmp_path.glob("*.run"):
            path.unlink()
        pinned = house.holdings.reserve(states[1])
        assert pinned is not None
        with pytest.raises(RunLostError):
            house.shelf.read(house.holdings.pages(pinned.new.items()))
        house.holdings.give_up(pinned)
        assert house.told.keys == {*house.holdings._kept._pieces, *house.shelf.pieces}
        assert house.told.keys < everything


def test_of_two_that_come_at_once_by_other_hashes_the_second_is_given_up(tmp_path: Path) -> None:
    with opened("hybrid", tmp_path) as house:
        one, other = (chain_of(range(40), quantum).prefix(8) for quantum in (2, BLOCK))
        first, second = house.holdings.reserve(one), house.holdings.reserve(other)
        assert first is not None
        assert second is not None
        house.holdings.commit(first)
        used_bytes = house.holdings.used_bytes
        with pytest.raises(ChainFormError, match="have all engines hash alike"):
            house.holdings.commit(second)
        assert house.holdings.used_bytes < used_bytes
        assert house.holdings.holds(one)


def test_a_revision_that_is_dropped_is_told_to_be_gone_from_memory_and_disk(tmp_path: Path) -> None:
    old, new = (
        replace(chain_of(range(20), BLOCK), revision=revision).prefix(20)
        for revision in ("v1", "v2")
    )
    with opened("all", tmp_path) as house:
        for prefix in (old, new):
            assert house.keep(prefix)
            there = house.holdings.pin_quietly(prefix)
            assert there is not None
            house.write(there)
            house.holdings.give_up(there)
        house.holdings.forget_revision("v1")
        assert {one.revision for one in house.told.keys} == {"v1", "v2"}  # the disk has it yet
        house.shelf.forget_revision("v1")
        assert {one.revision for one in house.told.keys} == {"v2"}
        assert (house.holdings.holds(old), house.holdings.holds(new)) == (False, True)
    with opened("all", tmp_path) as again:
        again.holdings.tell_everything()
        assert {one.revision for one in again.told.keys} == {"v2"}
        assert (again.holdings.holds(old), again.holdings.holds(new)) == (False, True)
