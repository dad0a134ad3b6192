"""A key for every word of a page, by what lies there in the state and not by which page it is.

Two engines give the same key to the same piece of the same element at the same token, whatever
their layouts are. What no element lies on has a key too: that of its place.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from restow.broker.layout import Layout, RankLayout, Region, Shard

WORD_BYTES = 2
PADDING = -1

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint16]
_Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Keys:
    """Those of one region of a rank."""

    words: Words
    """``[index, word]``: of the page that stands at this index of a list of pages."""
    token: Int32s
    """``[word]``: the token of the page whose word it is, or ``PADDING``."""
    page_tokens: int
    """0: a page holds a snapshot, whose words are those of token 0."""

    def needed(self, index: int, position_tokens: int) -> Bools:
        """Return which words of a page belong to a state at this position."""
        tokens = position_tokens - index * self.page_tokens
        mask: Bools = (self.token != PADDING) & (self.token < max(tokens, 0))
        return mask


@cache
def keys_of(layout: Layout, rank: int, name: str, pages: int) -> Keys:
    """Return the keys of a region, for lists of up to ``pages`` pages."""
    held = next(one for one in layout.ranks if one.rank == rank)
    region = held.region(name)
    size = region.page_stride_bytes // WORD_BYTES
    entries = 1 if region.page_tokens is None else pages
    token = np.full(size, PADDING, np.int32)
    place = np.arange(size, dtype=np.uint64) + _named(f"padding of {rank}, {name}")
    for shard in (shard for shard in held.shards if shard.region == name):
        where, inside, which = _words(layout, held, region, shard)
        token[where] = inside
        place[where] = which + _named(shard.field)
    tokens = (region.page_tokens or 0) * np.arange(entries)[:, None] + token
    mixed = _mixed(_mixed(place) + tokens.astype(np.uint64))
    return Keys((mixed >> np.uint64(48)).astype(np.uint16), token, region.page_tokens or 0)


def _words(
    layout: Layout, rank: RankLayout, region: Region, shard: Shard
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], _Numbers]:
    """Return the words of a page that a shard covers, their tokens and their field numbers."""
    shape = next(field.shape for field in layout.model.fields if field.name == shard.field)
    parts = shard.dtype.itemsize_bytes // WORD_BYTES
    if not parts:
        raise ValueError(f"elements of {shard.dtype.value} are less than a word")
    at = np.full((1,), shard.offset_bytes, np.int64)
    number = np.zeros((1,), np.int64)
    for size, span, stride in zip(shape, shard.box, shard.strides_bytes, strict=True):
        at = (at[:, None] + stride * np.arange(span.size)).ravel()
        number = (number[:, None] * size + np.arange(span.start, span.stop)).ravel()
    tokens = np.arange(region.page_tokens or 1)[:, None, None]
    of_word = np.arange(parts)
    where = at[:, None] // WORD_BYTES + of_word
    where = where + tokens * ((shard.token_stride_bytes or 0) // WORD_BYTES)
    inside, which = np.broadcast_arrays(tokens, number[:, None] * parts + of_word)
    which = np.broadcast_to(which, where.shape)
    return (
        where.ravel(),
        np.broadcast_to(inside, where.shape).ravel(),
        which.ravel().astype(np.uint64),
    )


def _named(name: str) -> np.uint64:
    return np.uint64(zlib.crc32(name.encode()) << 32)


def _mixed(numbers: _Numbers) -> _Numbers:
    """Return mixed numbers, as splitmix64 does: near numbers become far ones."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
