"""Law: P and D hash the same bytes in the same order, all that is read and nothing else.

Whatever the layouts, types, prefixes held, ways of travelling, and reads that are joined. Neither
side knows the other's addresses. Then the law is shown to bite.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given

from laws import digesting
from laws.digesting import check_digests, content, handed_over
from laws.executor import Arena
from laws.rebuilding import rebuilding_cases
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, any_cases, cast_cases
from laws.test_laws_bite import bites, change_function
from restow.agents.binding import extents
from restow.agents.binding.copies import AlikeRows
from restow.agents.binding.extents import Extents
from restow.agents.copying import copier as hashing
from restow.agents.copying.copier import Copier
from restow.agents.execute import staged_reads
from restow.agents.execute import staged_reads as comparing
from restow.agents.memory.regions import HOST
from restow.broker.errors import StrategyRefusedError
from restow.broker.planner import Strategy


@tried("digests")
@given(any_cases(), STRATEGIES)
def test_both_sides_hash_what_is_read(case: Case, strategy: Strategy) -> None:
    check_digests(case, strategy)


@tried("digests, casts")
@given(cast_cases(), CASTING)
def test_casts(case: Case, strategy: Strategy) -> None:
    check_digests(case, strategy)


@tried("digests, recompute")
@given(rebuilding_cases())
def test_inputs_of_windows(case: Case) -> None:
    try:
        check_digests(case, Strategy.RECOMPUTE)
    except StrategyRefusedError:
        assume(False)


@pytest.mark.parametrize("in_place", [0, 2, 1000])
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 1 << 20])
def test_a_digest_is_that_of_the_bytes_in_order(
    monkeypatch: pytest.MonkeyPatch, in_place: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(hashing, "IN_PLACE_PIECES", in_place)
    data = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    hasher = hashing.Hasher(HOST, Copier())
    for begins, lengths in (
        ([], []),
        ([7], [3]),
        ([4000, 0, 2000], [1000, 700, 1]),
        (range(0, 4900, 7), [5] * 700),
    ):
        address = np.array(begins, np.int64) + data.ctypes.data
        made = Extents.joined([Extents(address, np.array(lengths, np.int64))])
        whole = b"".join(data[b : b + n].tobytes() for b, n in zip(begins, lengths, strict=True))
        assert hasher._digest(made) == xxhash.xxh3_128_digest(whole)
        parts = list(made.chunks(chunk_bytes))
        assert [part.size_bytes for part in parts[:-1]] == [chunk_bytes] * (len(parts) - 1)


def test_what_lies_in_many_pieces_is_hashed_like_one() -> None:
    # The law compares the bytes that are hashed; this test compares the digests.
    hasher = hashing.Hasher(HOST, Copier())

    @given(any_cases(), STRATEGIES)
    @tried("digests, casts")
    def agree(case: Case, strategy: Strategy) -> None:
        arena = Arena()
        for one in handed_over(case, strategy, arena):
            found = hasher._digest(one.destination)
            assert found == xxhash.xxh3_128_digest(one.source_bytes)
            assert one.destination_bytes == content(arena, one.destination)

    agree()


def law(strategy: Strategy) -> Any:
    return lambda case: check_digests(case, strategy)


def test_rows_cut_by_the_pages_of_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[Any] = []

    def of_side(right: Any, program: Any, src_rank: int, memory: Any, side: Any, *more: Any) -> Any:
        sides[:] = [side]
        return right(program, src_rank, memory, side, *more)

    def by_own_pages(right: Any, part: Any, tokens: Any) -> Any:
        return right(replace(part, sides=tuple(sides)), tokens)

    for module in (extents, comparing):
        change_function(monkeypatch, module, "direct_extents", of_side)
    change_function(monkeypatch, AlikeRows, "stretches", by_own_pages)
    bites(law(Strategy.SLICES), any_cases(), tries=3000)


def test_in_the_order_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def ordered(right: Any, *args: Any) -> Any:
        found = right(*args)
        order = np.argsort(found.address)
        return Extents(found.address[order], found.length_bytes[order])

    monkeypatch.setattr(
        Extents, "joined", classmethod(lambda cls, parts: ordered(JOINED, cls, parts))
    )
    bites(law(Strategy.SLICES), any_cases())


JOINED = Extents.joined.__func__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "strategy"),
    [
        ("direct_extents", Strategy.SLICES),
        ("one_extent", Strategy.PACK),
        ("one_extent", Strategy.INTERLEAVE),
        ("own_span_extents", Strategy.WHOLE),
    ],
)
def test_rows_that_nobody_hashes(
    monkeypatch: pytest.MonkeyPatch, function: str, strategy: Strategy
) -> None:
    # Rows that both sides leave out would give equal digests that prove nothing.
    nothing = Extents(np.empty(0, np.int64), np.empty(0, np.int64))
    for module in (extents, staged_reads, comparing, digesting):
        for name in (function, function.replace("own_span", "staged_span")):
            if hasattr(module, name):
                whole = nothing if function == "one_extent" else [nothing]
                monkeypatch.setattr(module, name, lambda *_, whole=whole: whole)
    bites(law(strategy), any_cases())


def test_the_rows_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_rank(right: Any, program: Any, src_rank: int, *args: Any) -> Any:
        ranks = program.src_ranks
        return right(program, ranks[(ranks.index(src_rank) + 1) % len(ranks)], *args)

    change_function(monkeypatch, comparing, "direct_extents", next_rank)
    bites(law(Strategy.SLICES), any_cases())
