"""The law by which rows and pages become addresses."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from restow.agents.binding.pages import PageList, Stretches
from restow.broker.errors import PageRangeError
from restow.broker.layout.rows import Bools, Int64s


@dataclass(frozen=True, slots=True)
class Lines:
    """Where rows lie in one memory, pages and tokens left open.

    Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
    (t % page_tokens) * token_stride + i * step``, where ``page`` is the one that holds token ``t``.
    ``first_address`` is ``base + offset``, and ``i * step`` is left to whoever copies elements.

    Arrays are ``[rows, 1]`` or ``[regions, 1, rows]``: the axis of length 1 is that of stretches.
    Strides that all rows share may be one. ``page_count`` is that of the smallest region among
    them, of the memory called ``name``, where a list from elsewhere names their pages.

    A row 8 bytes from the beginning of its page, which holds 4 tokens of 16 bytes; then the same
    tokens, 2 to 8, in a run, which is one page for all of them:

    >>> from restow.agents.binding.pages import Tokens, cut_tokens
    >>> stretches = cut_tokens(Tokens(2, 9), (4,))
    >>> one = np.ones((1, 1), np.int64)
    >>> paged = Lines(one * 1008, one * 256, one * 16)
    >>> paged.addresses(PageList(np.array([5, 7, 3]), 4), stretches).tolist()
    [[2320, 2800, 1776]]
    >>> run = Lines(one * 4096, one * 0, one * 16)
    >>> run.addresses(PageList(None), stretches).tolist()
    [[4096, 4128, 4192]]
    """

    first_address: Int64s
    page_stride_bytes: Int64s
    token_stride_bytes: Int64s
    page_count: int = sys.maxsize
    name: str = ""

    def addresses(self, pages: PageList, stretches: Stretches) -> Int64s:
        """Where every row begins at every stretch. Raises `PageRangeError`."""
        self._check(pages.ids)
        return self.at(*pages.holding(stretches))

    def at(self, page: Int64s | None, in_page: Int64s | None = None) -> Int64s:
        """Where every row begins at each ``in_page``-th token of a ``page``; None: all are 0."""
        axes = self.first_address.ndim
        moved = [
            _moved(stride, count, axes)
            for stride, count in (
                (self.page_stride_bytes, page),
                (self.token_stride_bytes, in_page),
            )
            if count is not None
        ]
        # What rows share is small, and added first.
        return reduce(add, [*moved, self.first_address])

    def some(self, mask: Bools) -> Lines:
        """Those of a flat mask, as ``[rows, 1]``."""
        first, page, token = (
            np.broadcast_to(values, self.first_address.shape).ravel()[mask, None]
            for values in (self.first_address, self.page_stride_bytes, self.token_stride_bytes)
        )
        return replace(self, first_address=first, page_stride_bytes=page, token_stride_bytes=token)

    def kept(self) -> Lines:
        """The same, cheaper to use often: strides that all rows share are one."""
        page, token = one_if_alike(self.page_stride_bytes), one_if_alike(self.token_stride_bytes)
        return replace(self, page_stride_bytes=page, token_stride_bytes=token)

    def _check(self, page: Int64s | None) -> None:
        """Raise `PageRangeError` unless all pages are there."""
        count = self.page_count
        if page is not None and len(page) and (page.min() < 0 or page.max() >= count):
            wrong, there = page[(page < 0) | (page >= count)][0], f"[0, {count})"
            raise PageRangeError(
                f"{self.name} page {wrong} is outside of {there}",
                side=self.name,
                page=wrong,
                range=there,
            )


def _moved(stride_bytes: Int64s, count: Int64s, axes: int) -> Int64s:
    """By how much so many strides move rows, along the axis of stretches, the last but 0 or 1."""
    stride = one_if_alike(stride_bytes) if len(count) > 1 else stride_bytes
    return stride * (count if axes == 2 else count[:, None])


def one_if_alike(values: Int64s) -> Int64s:
    """The first of equal values, along every axis, or all: what is made of one is made once."""
    if values.size > 1 and (values == values.flat[0]).all():
        return values[(slice(1),) * values.ndim]
    return values
