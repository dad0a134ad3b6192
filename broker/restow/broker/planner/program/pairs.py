"""Pairs of lists of block ids, one of each side, that rows use together."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout.token_class import ALL_TOKENS, TokenClass, count_shared


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a side's list of block ids addresses tokens; ``page_tokens`` 0 means snapshots.

    Its pages hold those ``tokens`` alone. ``whole_blocks``: a block that is written at all is
    written from its beginning.
    """

    group: str
    page_tokens: int
    pages_per_block: int
    tokens: TokenClass = ALL_TOKENS
    whole_blocks: bool = False

    @property
    def block_tokens(self) -> int:
        """How many tokens of a prompt a block reaches over, others' too; 0: it holds snapshots."""
        return self.page_tokens * self.pages_per_block * self.tokens.parts


NO_LIST = ""
"""The group of no list: rows that are zeroed need none of the source."""


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A list of page ids on each side that rows use together.

    Of the source there may be none (`NO_LIST`), where nothing of it is read. Rows repeat for the
    tokens that both sides hold. With ``window_tokens`` they do for so many tokens before the last
    one; 0: for all. A destination of ``whole_blocks`` gets those before them in its block, too.
    """

    src: PageForm
    dst: PageForm
    window_tokens: int = 0

    @property
    def has_source(self) -> bool:
        """Whether it has a list of the source."""
        return self.src.group != NO_LIST

    @property
    def per_token(self) -> bool:
        """Whether rows of this pair repeat for every token."""
        return self.src.page_tokens > 0

    @property
    def alike(self) -> bool:
        """Whether both sides hold the same tokens, so that these follow each other alike."""
        return self.src.tokens == self.dst.tokens

    def first_token(self, start: int, stop: int) -> int:
        """Where the tokens that move begin, of ``[start, stop)``.

        >>> kv, kept = PageForm("kv", 16, 1), PageForm("kv", 16, 1, whole_blocks=True)
        >>> GroupPair(kv, kv, 31).first_token(0, 57), GroupPair(kv, kept, 31).first_token(0, 57)
        (26, 16)
        """
        if not self.window_tokens:
            return start
        first = stop - self.window_tokens
        if self.dst.whole_blocks:
            first -= first % self.dst.block_tokens
        return max(start, first)

    def src_pages(self, start: int, stop: int) -> range:
        """Which of the source's pages, counted from token 0, hold what moves of ``[start, stop)``.

        Some of them may hold nothing that moves, where D's ranks share tokens out.

        >>> GroupPair(PageForm("kv", 16, 1), PageForm("kv", 8, 1)).src_pages(20, 50)
        range(1, 4)
        """
        if not self.per_token:
            return range(1)
        held, size = self.src.tokens, self.src.page_tokens
        begin = self.first_token(start, stop)
        first, last = held.before(begin), held.before(stop)
        if first >= last or not (self.alike or count_shared(held, self.dst.tokens, begin, stop)):
            return range(0)
        return range(first // size, -(-last // size))
