"""Pairs of lists of block ids, one of each side, that rows use together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageForm:
    """How a side's list of block ids addresses tokens; ``page_tokens`` 0 means snapshots.

    ``whole_blocks``: a block that is written at all is written from its beginning.
    """

    group: str
    page_tokens: int
    pages_per_block: int
    whole_blocks: bool = False

    @property
    def block_tokens(self) -> int:
        """Tokens in a block; 0: it holds snapshots."""
        return self.page_tokens * self.pages_per_block


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A list of page ids on each side that rows use together.

    With ``window_tokens`` rows repeat for so many tokens before the last one; 0: for all. A
    destination of ``whole_blocks`` gets those before them in its block, too.
    """

    src: PageForm
    dst: PageForm
    window_tokens: int = 0

    @property
    def per_token(self) -> bool:
        """Whether rows of this pair repeat for every token."""
        return self.src.page_tokens > 0

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

        >>> GroupPair(PageForm("kv", 16, 1), PageForm("kv", 8, 1)).src_pages(20, 50)
        range(1, 4)
        """
        if not self.per_token:
            return range(1)
        if start >= stop:
            return range(0)
        size = self.src.page_tokens
        return range(self.first_token(start, stop) // size, -(-stop // size))
