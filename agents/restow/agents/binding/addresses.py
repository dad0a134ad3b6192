"""The law by which rows and pages become addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from restow.agents.binding.pages import PageList, Stretches, check_pages
from restow.broker.layout.rows import Bools, Int64s


@dataclass(frozen=True, slots=True)
class Lines:
    """Where rows lie in one memory, pages and tokens left open.

    Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
    (t % page_tokens) * token_stride + i * step``, where ``page`` is the one that holds token ``t``.
    ``first_address`` is ``base + offset``, and ``i * step`` is left to whoever copies elements.

    Arrays are ``[rows, 1]`` or ``[regions, 1, rows]``: the axis of length 1 is that of stretches.
    Strides that all rows share may be one. ``page_count`` is that of the smallest region among
    them, of the memory called ``name``; None: no list from elsewhere names their pages.

    A row 8 bytes from the beginning of its page, which holds 4 tokens of 16 bytes; then the same
    tokens, 2 to 8, in a run, which is one page for all of them:

    >>> from restow.agents.binding.pages import Tokens, cut_tokens
    >>> stretches = cut_tokens(Tokens(2, 9), (4,))
    >>> one = np.ones((1, 1), np.int64)
    >>> paged = Lines(one * 1008, one * 256, one * 16)
    >>> paged.addresses(PageList(np.array([5, 7, 3]), 4), stretches).tolist()
    [[2320, 2800, 1776]]
    >>> run = Lines(one * 4096, one * 0, one * 16)
    >>> run.addresses(PageList(np.array([0]), first_token=2), stretches).tolist()
    [[4096, 4128, 4192]]
    """

    first_address: Int64s
    page_stride_bytes: Int64s
    token_stride_bytes: Int64s
    page_count: int | None = None
    name: str = ""

    def addresses(self, pages: PageList, stretches: Stretches) -> Int64s:
        """Where every row begins at every stretch. Raises `PageRangeError`."""
        self.check(pages.ids)
        return self.at(*pages.holding(stretches))

    def at(self, page: Int64s, in_page: Int64s | None = None) -> Int64s:
        """Where every row begins at each ``in_page``-th token of a ``page``; None: the first."""
        stretches = (-1,) + (1,) * (self.first_address.ndim - 2)
        moved = self.page_stride_bytes * page.reshape(stretches)
        if in_page is not None:
            moved = moved + self.token_stride_bytes * in_page.reshape(stretches)
        return self.first_address + moved

    def some(self, mask: Bools) -> Lines:
        """Those of a flat mask, as ``[rows, 1]``."""
        first, page, token = (
            np.broadcast_to(values, self.first_address.shape).ravel()[mask, None]
            for values in (self.first_address, self.page_stride_bytes, self.token_stride_bytes)
        )
        strides = one_if_alike(page), one_if_alike(token)
        return Lines(first, *strides, self.page_count, self.name)

    def check(self, page: Int64s) -> None:
        """Raise `PageRangeError` unless all pages are there."""
        if self.page_count is not None:
            check_pages(page, self.page_count, self.name)


def one_if_alike(values: Int64s) -> Int64s:
    """The first of equal values, along every axis, or all: what is made of one is made once."""
    if values.size and (values == values.flat[0]).all():
        return values[(slice(1),) * values.ndim]
    return values
