"""Bind the spans of a program: which pages are read into staging whole, and what comes out of them.

A span's pages lie in staging one after the other, those of all spans one span after the other. So
staging is memory with regions and pages like any other: span ``i`` is region ``i``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from restow.agents.binding import STAGING_ALIGN_BYTES, Blocks, RegionTable, Tokens, merged
from restow.agents.paging import check_pages
from restow.agents.pieces import Copies, Descriptors, Ends, Grid, grid
from restow.agents.sides import DST, SRC, Lines, by_pair, cut, pages_of
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair, SpanColumn


def staged_spans(
    spans: Int64s, pairs: Sequence[GroupPair], tokens: Tokens, staging_address: int
) -> tuple[RegionTable, int]:
    """The spans as regions of a run at ``staging_address``, and the length of that run."""
    counts = [len(pair.src_pages(tokens.start, tokens.stop)) for pair in pairs]
    pages = np.array(counts, np.int64)[spans[:, SpanColumn.GROUP_PAIR]]
    stride = -(-spans[:, SpanColumn.LENGTH_BYTES] // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
    ends = np.cumsum(pages * stride)
    table = RegionTable(staging_address + ends - pages * stride, stride, pages)
    return table, int(ends[-1]) if len(ends) else 0


def bind_spans(
    spans: Int64s,
    chosen: Bools,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    staged: RegionTable,
    src_blocks: Blocks,
    tokens: Tokens,
) -> Descriptors:
    """Descriptors of the ``chosen`` spans, which have one source rank, whose memory is ``src``.

    Raises `PageCountError` and `PageRangeError`.
    """
    tables = [np.empty((3, 0), np.int64)]
    for number, pair in enumerate(pairs):
        index = np.flatnonzero(chosen & (spans[:, SpanColumn.GROUP_PAIR] == number))
        held = pair.src_pages(tokens.start, tokens.stop)
        if not len(index) or not len(held):
            continue
        table = spans[index]
        region = table[:, SpanColumn.SRC_REGION]
        pages = pages_of(pair, SRC, src_blocks, tokens)[held.start : held.stop]
        check_pages(pages, int(src.page_count[region].min()), SRC.name)
        begin = src.base_address[region] + table[:, SpanColumn.OFFSET_BYTES]
        there = begin[:, None] + src.page_stride_bytes[region][:, None] * pages
        here = staged.base_address[index][:, None]
        here = here + staged.page_stride_bytes[index][:, None] * np.arange(len(held))
        lengths = np.broadcast_to(table[:, SpanColumn.LENGTH_BYTES][:, None], there.shape)
        tables.append(merged(there, here, lengths))
    return Descriptors(*np.concatenate(tables, axis=1))


def bind_extract(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    staged: RegionTable,
    dst_regions: RegionTable,
    dst_blocks: Blocks,
    tokens: Tokens,
) -> Copies:
    """Copies from the spans in staging to pages. Raises `PageCountError` and `PageRangeError`."""
    grids: list[Grid] = []
    for pair, table in by_pair(rows, pairs):
        held = pair.src_pages(tokens.start, tokens.stop)
        # Page 0 in staging is the first one that was read.
        src_pages = np.maximum(np.arange(held.stop) - held.start, 0)
        dst_pages = pages_of(pair, DST, dst_blocks, tokens)
        joined = SRC.joined(table) & DST.joined(table)
        for part, whole in ((table[joined], True), (table[~joined], False)):
            stretches = cut(pair, (SRC, DST), tokens, whole)
            if not len(part) or not len(stretches.first):
                continue
            src, dst = (
                Ends(
                    Lines.of(part, memory, side).addresses(pages, side.form(pair), stretches).T,
                    part[:, [side.step]],
                    part[:, [side.dtype]],
                )
                for memory, side, pages in ((staged, SRC, src_pages), (dst_regions, DST, dst_pages))
            )
            count = part[:, [Column.COUNT]]
            grids.append(grid(src, dst, count * stretches.count if whole else count))
    return Copies(tuple(grids))
