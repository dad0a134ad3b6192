"""The law of splitting a read: every byte once, in order, in parts of about equal size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from restow.agents.pieces import SPLIT_BYTES, Descriptors

PIECE = st.tuples(st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.integers(1, 6 * SPLIT_BYTES))


def byte_pairs(parts: list[Descriptors]) -> list[tuple[int, int]]:
    """(source address, destination address) of every byte, in order."""
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


@given(st.lists(PIECE, min_size=1, max_size=6), st.integers(1, 5))
def test_every_byte_is_in_exactly_one_part(pieces: list[tuple[int, int, int]], count: int) -> None:
    whole = Descriptors(*(np.array(column, np.int64) for column in zip(*pieces, strict=True)))
    before = byte_pairs([whole])
    parts = whole.split(count)
    assert byte_pairs(parts) == before
    assert len(parts) == count
    for part in parts:
        assert abs(part.size_bytes - whole.size_bytes / count) <= 2 * SPLIT_BYTES
        assert (part.length_bytes > 0).all()
    assert byte_pairs([whole]) == before, "splitting changed the whole"
