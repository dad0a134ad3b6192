"""Law: P and D hash the same bytes in the same order, all that is read and nothing else.

Whatever the layouts, types, prefixes held, ways of travelling, and reads that are joined. Neither
side knows the other's addresses.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given

from laws.checks import check_digests
from laws.rebuilding import rebuilding_cases
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, any_cases, cast_cases
from restow.agents.binding.extents import Extents
from restow.agents.copying import copier as hashing
from restow.agents.copying.copier import Copier
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
async def test_a_digest_is_that_of_the_bytes_in_order(
    monkeypatch: pytest.MonkeyPatch, in_place: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(hashing, "IN_PLACE_PIECES", in_place)
    data = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    hasher = hashing.Hasher(HOST, Copier(HOST.device))
    for begins, lengths in (
        ([], []),
        ([7], [3]),
        ([4000, 0, 2000], [1000, 700, 1]),
        (range(0, 4900, 7), [5] * 700),
    ):
        address = np.array(begins, np.int64) + data.ctypes.data
        made = Extents.joined([Extents(address, np.array(lengths, np.int64))])
        whole = b"".join(data[b : b + n].tobytes() for b, n in zip(begins, lengths, strict=True))
        assert await hasher.digest(made) == xxhash.xxh3_128_digest(whole)
        parts = list(made.chunks(chunk_bytes))
        assert [part.size_bytes for part in parts[:-1]] == [chunk_bytes] * (len(parts) - 1)
