"""D's demand: the blocks that it wants filled, and where it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from restow.broker.block_ids import MAX_BLOCKS, MAX_LIST_BYTES
from restow.broker.core.engines.block_lists import BlockLists
from restow.broker.core.events import Wish
from restow.broker.core.handoffs.sides.publication import Publication
from restow.broker.core.prefix.named import NamedPrefix
from restow.broker.errors import ContentMismatchError, PagesError


class Demand(NamedTuple):
    """What D asks for."""

    blocks: Mapping[str, bytes]
    held_tokens: int = 0
    position_tokens: int = 0
    """Where D goes on from; 0: anywhere."""
    content: bytes = b""
    """What the state is of, as D names it; empty: not named."""
    prefix: NamedPrefix | None = None
    """What engines are to hold already; None: a P was told to publish it."""
    takes_sampled: bool = False
    """Whether D goes on behind the token that P sampled."""
    revision: str = ""
    """Revision of the weights that D computes with; empty: that of its layout."""
    write_mark: int = 0
    """What agents wait for before they write, as in `Wish`."""

    @classmethod
    def of(cls, wish: Wish) -> Demand:
        """What is asked for, not looked at."""
        return cls(dict(wish.blocks), *_beside_blocks(wish))

    @classmethod
    def checked(cls, handoff_id: str, lists: BlockLists, wish: Wish) -> Demand:
        """What is asked for; ``lists`` are D's. Raises a `PagesError`."""
        blocks: dict[str, bytes] = {}
        for group, data in wish.blocks:
            lists.check_ids(group, data)
            if group in blocks or len(data) > MAX_LIST_BYTES:
                raise PagesError(
                    f"handoff {handoff_id}: group {group} is listed more than once, or has more "
                    f"than {MAX_BLOCKS} blocks",
                    handoff=handoff_id,
                    group=group,
                )
            blocks[group] = data
        if lists.overlaid:
            lists.check_overlaid(blocks)
        return cls(blocks, *_beside_blocks(wish))

    def check_content(self, handoff_id: str, published: Publication) -> None:
        """Raise `ContentMismatchError` if P's state, published whole, is of other content.

        A D that goes on from elsewhere is refused for that.
        """
        named = self.prefix is not None or bool(published.content and self.content)
        differ = named and published.content != self.content
        if differ and self.position_tokens == published.position_tokens:
            raise ContentMismatchError(
                f"handoff {handoff_id}: the {self.position_tokens} tokens that D goes on from, or "
                f"what else they are computed from, are not those of P's state (D's content "
                f"{self.content[:8].hex()}, P's {published.content[:8].hex()}): was P given the "
                f"same prompt, adapter, images and salt?",
                handoff=handoff_id,
            )

    def fits_sampled(self, handoff_id: str, published: Publication) -> bool:
        """Whether D takes the token that P, having published all, has sampled."""
        if not self.takes_sampled or published.sampled_token is None:
            return False
        try:
            self.check_content(handoff_id, published)
        except ContentMismatchError:
            return False
        return self.position_tokens == published.position_tokens

    @property
    def size_bytes(self) -> int:
        """Of its ids and hashes."""
        prefix_bytes = 0 if self.prefix is None else self.prefix.size_bytes
        return sum(map(len, self.blocks.values())) + prefix_bytes

    def without_blocks(self) -> Demand:
        """What is kept of it after the end."""
        return self._replace(blocks={}, prefix=None)

    @property
    def key(self) -> int:
        """It as one number, unguessable from outside."""
        blocks = frozenset(self.blocks.items())
        return hash((blocks, self[1:4], self.takes_sampled, self.revision))


def _beside_blocks(wish: Wish) -> tuple[int, int, bytes, NamedPrefix | None, bool, str, int]:
    content = wish.content if wish.prefix is None else wish.prefix.content
    named = wish.held_tokens, wish.position_tokens, content
    return *named, wish.prefix, wish.takes_sampled, wish.revision, wish.write_mark


NO_DEMAND = Demand({})


def is_compared(published: Publication, wanted: Demand) -> bool:
    """Whether both sides named the content of a state that is published whole."""
    return published.final and bool(published.content and wanted.content)


def content_compared(published: Publication, wanted: Demand) -> str:
    """Whose words of the content were compared."""
    if published.content and wanted.content:
        return "compared"
    if published.content or wanted.content:
        return f"named by {'P' if published.content else 'D'} alone"
    return "not named"
