"""D's side of a handoff: its demand, the messages that name it, and its offer by prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from restow.broker.block_ids import MAX_BLOCKS, MAX_LIST_BYTES
from restow.broker.core.common.events import NamedPrefix, Wish
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.blocks import BlockLists
from restow.broker.core.handoffs.publication import Publication
from restow.broker.errors import ContentMismatchError, PagesError


@dataclass(slots=True, eq=False)
class Offer:
    """What operators see of it too, also after the end."""

    tokens: int
    """Of the prefix that is asked for."""
    revision: str = ""
    """Of the weights that computed it."""
    left: list[EngineKey] = field(default_factory=list)
    """To whom it was not offered yet; the best is the last."""
    engine: EngineKey | None = None
    """Who has it now."""
    until_s: float = 0.0
    """When it goes to the next."""
    made: int = 0
    declined: int = 0

    def close(self) -> None:
        """Be offered to nobody any more."""
        self.left, self.engine = [], None


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


MAX_MESSAGES = 16
"""Messages that may say one demand."""


@dataclass(slots=True, eq=False)
class DemandMessages:
    """By their messages' numbers.

    Calls have negative ones. All calls of a demand are told its end when it is told with any number
    but 0, that of a session's message without one: so the latest call's is kept while no session's
    message has one of its own.
    """

    numbers: tuple[int, ...] = ()
    """Those that are told the end, first the one that was said first."""
    given_up: tuple[int, ...] = ()
    """Those of them that wait no longer."""

    def add(self, number: int) -> bool:
        """Take a message that says the demand, or says it again; False: it has too many."""
        numbered = any(one > 0 for one in self.numbers)
        if number in self.numbers or (number < 0 and numbered):
            return True
        kept = tuple(one for one in self.numbers if one >= 0 or number == 0)
        if len(kept) >= MAX_MESSAGES:
            return False
        self.numbers = (*kept, number)
        return True

    def give_up(self, number: int) -> bool:
        """One waits no longer; False: another one does."""
        given_up = {*self.given_up, number}
        self.given_up = tuple(one for one in self.numbers if one in given_up)
        return self.given_up == self.numbers
