"""The time and memory needed to look up who holds a prompt's state, beside a bare dictionary."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.report import Put, Row, compared
from restow.broker.core.common.events import Chain, HashForm
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.prefix.index import KEY_BYTES, HashKeys, Keyer
from restow.broker.core.prefix.prefixes import Holders, Prefixes
from restow.broker.core.prefix.rules import SNAPSHOT, GroupRule
from restow.broker.layout.values import ModelIdentity

SUITE = "prefix-lookup"
TENANT = "t"
MODEL = ModelIdentity("hybrid", "v1")
FORM = HashForm("sha256", 16, 32)
HYBRID = (GroupRule("attention", 1), GroupRule("window", 1, 64), GroupRule("state", SNAPSHOT))
CHAIN_HASHES, CHAIN_TOKENS = 512, 8192
TOLD_HASHES = 128
"""Hashes that a holder reports at a time: a chunk of prefill."""
ENTRIES = 1_000_000
MANY_ENTRIES = 10_000_000
LOOK_GOAL_S, EACH_GOAL_S = 0.000_5, 0.000_1
"""Goals of a single look-up at the median, and of 10,000 in a second."""
MEMORY_GOAL_GB = 2.5
LOOKS = 300


def run(put: Put, repeats: int) -> None:
    """Look up chains of 8,192 tokens in all groups of a hybrid, held by one engine and by eight."""
    for holders in (1, 8):
        for row in _looked_up(ENTRIES, holders, repeats):
            put(row)
    put(_fragments(repeats))
    put(_memory())


class Held:
    """An index of hashes, and who holds them."""

    def __init__(self, entries: int, holders: int, told: int = TOLD_HASHES) -> None:
        """Have every holder report each chain, piece by piece."""
        self.prefixes = Prefixes(Limits(max_holdings_bytes=1 << 40), b"bench")
        self.chains = entries // CHAIN_HASHES
        own = self.holders = self.prefixes.holders[TENANT] = Holders()
        keyer, index = Keyer(b"bench"), own.index
        tellers = [
            own.begin(EngineKey(TENANT, f"e{number}"), MODEL, FORM, HYBRID)
            for number in range(holders)
        ]
        for chain in range(self.chains):
            keys = keyer.keys(MODEL, FORM, "", hashes_of(chain))
            for teller in tellers:
                for first in range(0, CHAIN_HASHES, told):
                    parent = keys.values[first - 1] if first else None
                    index.hold(teller.slots["attention"], _part(keys, first, told), parent)
                index.hold(teller.slots["window"], _part(keys, CHAIN_HASHES - 64, 64))
                for last in range(127, CHAIN_HASHES, 128):
                    index.hold(teller.slots["state"], _part(keys, last, 1))

    @property
    def counted_bytes(self) -> int:
        """Return the bytes that the broker counts for the index."""
        return self.holders.index.size_bytes

    def find(self, hashes: bytes) -> int:
        """Return the tokens of the holder that holds most."""
        holders = self.prefixes.find(TENANT, Chain(MODEL, FORM, "", hashes))
        return max((holder.tokens for holder in holders), default=0)


def hashes_of(number: int) -> bytes:
    """Draw the hashes of a chain."""
    drawn = np.random.default_rng(number).bytes(CHAIN_HASHES * FORM.hash_bytes)
    return bytes(drawn)


def _part(keys: HashKeys, first: int, count: int) -> HashKeys:
    stop = first + count
    return HashKeys(keys.values[first:stop], keys.raw[first * KEY_BYTES : stop * KEY_BYTES])


def _looked_up(entries: int, holders: int, repeats: int) -> list[Row]:
    held = Held(entries, holders)
    plain: dict[bytes, int] = {}
    for chain in range(held.chains):
        plain.update(dict.fromkeys(_single(hashes_of(chain)), chain))
    rng = np.random.default_rng(0)
    looks = [hashes_of(int(number)) for number in rng.integers(held.chains, size=LOOKS)]
    misses = [hashes_of(held.chains + number) for number in range(LOOKS)]
    if {held.find(look) for look in looks} != {CHAIN_TOKENS} or any(map(held.find, misses)):
        raise RuntimeError("the index does not find what its holders reported")
    words = f"8,192 tokens of {entries / 1e6:.0f} M hashes, {holders} holder{'s' * (holders > 1)}"
    rows = []
    for name, asked in ((words, looks), (f"{words}, a miss", misses)):
        ours, theirs = [], []
        for _ in range(repeats):
            for look in asked:
                ours += [_once(partial(held.find, look))]
                theirs += [_once(partial(_plainly, plain, look))]
        rows.append(compared(SUITE, name, ours, "a dict of bytes, each hash", theirs))
        rows.append(compared(SUITE, name, ours, "budget of 0.5 ms", [LOOK_GOAL_S], goal=1.0))
        if not name.endswith("miss") and holders == 1:
            look_up_s = [_seconds_of_each(held, asked) for _ in range(repeats)]
            case = f"{name}, one after the other, of processor time"
            rows.append(
                compared(SUITE, case, look_up_s, "10,000 a second", [EACH_GOAL_S], goal=1.0)
            )
    return rows


def _single(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + FORM.hash_bytes] for at in range(0, len(hashes), FORM.hash_bytes)]


def _once(call: Callable[[], object]) -> float:
    """Return the seconds of a call, whose data is in no cache yet."""
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _seconds_of_each(held: Held, asked: list[bytes]) -> float:
    begun_s = time.process_time()
    for look in asked:
        held.find(look)
    return (time.process_time() - begun_s) / len(asked)


def _plainly(book: dict[bytes, int], hashes: bytes) -> list[int | None]:
    return list(map(book.get, _single(hashes)))


def _fragments(repeats: int) -> Row:
    """Measure the worst case: every other hash of each chain was evicted and reported again."""
    held = Held(100_000, 2)
    own = held.holders
    first, second = own.tellers.values()
    keyer = Keyer(b"bench")
    for chain in range(held.chains):
        keys = keyer.keys(MODEL, FORM, "", hashes_of(chain))
        for place in range(1, CHAIN_HASHES - 1, 2):
            for teller in (first, second):
                own.index.evict(teller.slots["attention"], _part(keys, place, 1))
            own.index.hold(first.slots["attention"], _part(keys, place, 1))
    looks = [hashes_of(number) for number in range(held.chains)]
    if {held.find(look) for look in looks} != {CHAIN_TOKENS}:
        raise RuntimeError("the index does not find what its holders reported")
    seconds = [_once(partial(held.find, look)) for _ in range(repeats) for look in looks]
    case = "8,192 tokens of which every other block was evicted and reported again"
    return compared(SUITE, case, seconds, "budget of 0.5 ms", [LOOK_GOAL_S])


def _memory() -> Row:
    """Measure the memory of ten million hashes."""
    before_bytes = _resident_bytes()
    held = Held(MANY_ENTRIES, 1)
    gc.collect()
    taken_bytes = _resident_bytes() - before_bytes
    looks = [hashes_of(number) for number in range(0, held.chains, held.chains // LOOKS)]
    seconds = median(_once(partial(held.find, look)) for look in looks)
    note = (
        f"{taken_bytes / 1e9:.2f} GB by the process, {held.counted_bytes / 1e9:.2f} counted; "
        f"a look-up {seconds * 1e6:.0f} us"
    )
    return compared(
        SUITE,
        "memory of 10 M hashes",
        [taken_bytes / 1e9],
        "budget of 2.5 GB",
        [MEMORY_GOAL_GB],
        goal=1.0,
        note=note,
        unit="GB",
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
