"""The law of splitting a read: every byte once, in order, in parts that take about as long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from restow.agents.binding.reads import PIECE_BYTES, SPLIT_BYTES, Descriptors

PIECE = st.tuples(st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.integers(1, 6 * SPLIT_BYTES))


def byte_pairs(parts: list[Descriptors]) -> list[tuple[int, int]]:
    """Return the (source address, destination address) of every byte, in order."""
    return [
        (src + at, dst + at)
        for part in parts
        for src, dst, length in zip(
            part.src_address.tolist(),
            part.dst_address.tolist(),
            part.length_bytes.tolist(),
            strict=True,
        )
        for at in range(length)
    ]


def effort(part: Descriptors) -> int:
    """Return the cost of a read, in bytes."""
    return part.size_bytes + PIECE_BYTES * len(part.length_bytes)


@given(st.lists(PIECE, min_size=1, max_size=6), st.integers(1, 5))
def test_every_byte_is_in_exactly_one_part(pieces: list[tuple[int, int, int]], count: int) -> None:
    whole = Descriptors(*(np.array(column, np.int64) for column in zip(*pieces, strict=True)))
    before = byte_pairs([whole])
    parts = whole.split(count)
    assert byte_pairs(parts) == before
    assert len(parts) == count
    for part in parts:
        assert abs(effort(part) - effort(whole) / count) <= 3 * (SPLIT_BYTES + PIECE_BYTES)
        assert (part.length_bytes > 0).all()
    assert byte_pairs([whole]) == before, "splitting changed the whole"


def test_many_small_pieces_are_not_all_given_to_one_part() -> None:
    small, large = np.full(512, 1024), np.array([512 * 1024])
    length = np.concatenate([small, large])
    at = np.cumsum(length) - length
    pages, state = Descriptors(at, at, length).split(2)
    assert len(state.length_bytes) > 200
    assert abs(effort(pages) - effort(state)) <= 3 * (SPLIT_BYTES + PIECE_BYTES)


@given(st.lists(PIECE, min_size=1, max_size=6), st.integers(64, 3 * SPLIT_BYTES))
def test_a_cut_leaves_every_byte_where_it_was(rows: list[tuple[int, int, int]], limit: int) -> None:
    pieces = Descriptors(*np.array(rows, np.int64).T)
    parts = pieces.cut(limit)
    assert byte_pairs([parts]) == byte_pairs([pieces])
    assert (parts.length_bytes <= limit).all()
