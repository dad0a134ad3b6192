"""What a store tells is what it has, in memory or on its disk, and what is found by it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from restow.agents.store.holdings import DiskThread, StoredStates, StoreMemory
from restow.agents.store.kept import Pinned
from restow.agents.store.room import (
    PAGE_ALIGN_BYTES,
    PageMove,
    PieceGroup,
    PieceKey,
    Room,
    Shape,
    StateKey,
    in_room,
)
from restow.agents.store.run_files import RunLostError
from restow.agents.store.shelf import Shelf
from restow.broker.client import HashForm, Prefix, PrefixChain, chain_of
from restow.broker.core.prefix.rules import longest, rules_of
from restow.broker.errors import ChainFormError, ChainInvalidError
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


def content(key: PieceKey, size_bytes: int) -> bytes:
    return Random(repr(key)).randbytes(8) * (size_bytes // 8)  # noqa: S311


class House:
    """A store without a session: its holdings, its disk, and what it told."""

    def __init__(self, name: str, folder: Path, size_bytes: int = 1 << 17) -> None:
        self.layout = layout_of(name)
        shape = Shape.of(self.layout)
        room = Room(shape.page_bytes, size_bytes)
        self.memory, self.told = StoreMemory(room), Told()
        self.shelf = Shelf(folder, self.layout, room.strides, 1 << 18)
        self.holdings = StoredStates(shape, room, self.memory, self.shelf, self.told)

    def keep(self, prefix: Prefix) -> bool:
        """Keep a state, whose new pages get the content of their pieces."""
        pinned = self.holdings.reserve(prefix)
        if pinned is None:
            return False
        for key, view in self.holdings.pages(pinned.new.items()):
            view[:] = content(key, len(view))
        self.holdings.commit(pinned)
        return True

    def pin(self, prefix: Prefix) -> Pinned | None:
        """Pin a state, and check that its pages hold the content of its pieces."""
        pinned = self.holdings.pin_quietly(prefix)
        if pinned is not None:
            for key, view in self.holdings.pages(pinned.pages()):
                assert view == content(key, len(view)), key
        return pinned

    def write(self, pinned: Pinned) -> None:
        self.shelf.write(pinned.prefix.form, self.holdings.pages(pinned.pages()))

    def keep_on_disk(self, prefix: Prefix) -> None:
        """Keep a state in memory and on the disk."""
        assert self.keep(prefix)
        pinned = self.pin(prefix)
        assert pinned is not None
        self.write(pinned)
        self.holdings.give_up(pinned)

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
                case 2 if kept and (there := house.pin(random.choice(kept[-4:]))):
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
            house.keep_on_disk(prefix)
        everything = set(house.told.keys)
        kept = house.holdings._kept._states
        kept.forget(kept.by_key[StateKey.of(states[1])])
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


def test_a_prefix_that_names_no_tokens_can_not_be_kept(tmp_path: Path) -> None:
    with opened("hybrid", tmp_path) as house:
        house.holdings.check(chain_of(range(40), BLOCK).prefix(8))
        with pytest.raises(ChainInvalidError, match="do not name 8 tokens"):
            house.holdings.check(Prefix(HashForm("any", BLOCK, 8), 8, (b"x" * 8,)))


def test_a_revision_that_is_dropped_is_told_to_be_gone_from_memory_and_disk(tmp_path: Path) -> None:
    old, new = (
        replace(chain_of(range(20), BLOCK), revision=revision).prefix(20)
        for revision in ("v1", "v2")
    )
    with opened("all", tmp_path) as house:
        for prefix in (old, new):
            house.keep_on_disk(prefix)
        house.holdings.forget_revision("v1")
        assert {one.revision for one in house.told.keys} == {"v1", "v2"}  # the disk has it yet
        house.shelf.forget_revision("v1")
        assert {one.revision for one in house.told.keys} == {"v2"}
        assert (house.holdings.holds(old), house.holdings.holds(new)) == (False, True)
    with opened("all", tmp_path) as again:
        again.holdings.tell_everything()
        assert {one.revision for one in again.told.keys} == {"v2"}
        assert (again.holdings.holds(old), again.holdings.holds(new)) == (False, True)


# -- the thread of the disk -----------------------------------------------------------------------


@contextmanager
def with_thread(folder: Path, memory_bytes: int = 1 << 20) -> Iterator[tuple[House, DiskThread]]:
    """Open a house of one chain's states, with a thread for its disk."""
    with opened("hybrid", folder) as house:
        disk = DiskThread(house.shelf, house.holdings, memory_bytes)
        yield house, disk
        disk.close()


CHAIN = chain_of(range(40), BLOCK)


def test_states_are_written_and_read_on_the_disks_thread_and_reads_come_first(
    tmp_path: Path,
) -> None:
    first, second = CHAIN.prefix(8), CHAIN.prefix(16)
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    with with_thread(tmp_path) as (house, disk):

        def wait() -> None:
            begun.set()
            assert go_on.wait(10)
            raise ValueError("a fault, which ends nothing else")

        def load() -> None:
            assert len(house.shelf) == 1, "it was read after what waited to be written"
            assert disk.bring(first) == ""
            done.append("loaded")

        house.keep_on_disk(first)
        house.holdings.forget_revision("")
        disk.read(wait)
        assert begun.wait(10)
        assert house.keep(second)
        disk.write(second)
        disk.write(CHAIN.prefix(24))  # nobody has it
        house.holdings.forget_revision("")
        assert house.holdings.used_bytes, "what waits to be written is gone"
        disk.read(load)
        go_on.set()
        disk.close()
        assert done == ["loaded"]
        assert house.pin(first) is not None
        assert len(house.shelf) == 2
        assert house.holdings.holds(second)


def test_no_more_waits_to_be_written_than_half_of_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = [CHAIN.prefix(8), CHAIN.prefix(16)]
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(10)

    with with_thread(tmp_path) as (house, _):
        for prefix in states:
            assert house.keep(prefix)
        pinned = [house.pin(prefix) for prefix in states]
        sizes = [house.holdings.size_bytes(one) for one in pinned if one]
        disk = DiskThread(house.shelf, house.holdings, 2 * max(sizes))
        disk.read(wait)
        assert begun.wait(10)
        for prefix in reversed(states):  # the larger one alone has room to wait
            disk.write(prefix)
        (record,) = caplog.records
        assert "the disk is too slow" in record.getMessage()
        go_on.set()
        disk.read(lambda: None)
        end_s = time.monotonic() + 10
        while len(house.shelf) < 2:  # when that is written there is room for the other
            assert time.monotonic() < end_s
            time.sleep(0.01)
            if len(house.shelf):
                assert pinned[1] is not None
                assert house.shelf.has(pinned[1].held)
                disk.write(states[0])
        disk.close()
        for one in pinned:
            assert one is not None
            house.holdings.give_up(one)
        house.holdings.forget_revision("")
        assert not house.holdings.used_bytes


def test_states_of_a_revision_are_dropped_after_what_waits_to_be_written(tmp_path: Path) -> None:
    with with_thread(tmp_path) as (house, disk):
        assert house.keep(CHAIN.prefix(8))
        disk.write(CHAIN.prefix(8))
        disk.forget_revision("")
        disk.close()
        assert not len(house.shelf)
        assert house.holdings.holds(CHAIN.prefix(8))


def test_pages_move_one_after_another_and_no_other_page_changes() -> None:
    room = Room({"a": 8, "b": 24}, 1 << 16)
    memory, stride = StoreMemory(room), room.strides["b"]
    before = [bytes([page]) * stride for page in range(6)]
    for page, written in enumerate(before):
        memory.page("b", page)[:] = written
    memory.move([PageMove("b", 4, 2), PageMove("b", 5, 4)])
    after = [bytes(memory.page("b", page)) for page in range(6)]
    assert after == [*before[:2], before[4], before[3], before[5], before[5]]


def test_states_keep_their_content_when_their_pages_move() -> None:
    small, large = PieceGroup("small", BLOCK), PieceGroup("large", 0)
    shape = Shape((small, large), {"small": PAGE_ALIGN_BYTES, "large": 4 * PAGE_ALIGN_BYTES})
    room = Room(shape.page_bytes, 22 * 4 * PAGE_ALIGN_BYTES)
    holdings = StoredStates(shape, room, StoreMemory(room), None, Told())

    def keep(prefix: Prefix) -> None:
        pinned = holdings.reserve(prefix)
        assert pinned is not None
        for key, view in holdings.pages(pinned.new.items()):
            view[:] = content(key, len(view))
        holdings.commit(pinned)

    states = [chain_of([number] * 12, BLOCK).prefix(12) for number in range(12)]
    for number, state in enumerate(states):
        keep(replace(state, revision="old" if number % 2 else ""))
    holdings.forget_revision("old")
    for number in range(20, 27):
        keep(chain_of([number] * 4, BLOCK).prefix(4))
    assert holdings.evictions == 0, "small pages moved to make room for a large one"
    for state in states[::2]:
        pinned = holdings.pin_quietly(state)
        assert pinned is not None
        for key, view in holdings.pages(pinned.pages()):
            assert view == content(key, len(view)), key
        holdings.give_up(pinned)
