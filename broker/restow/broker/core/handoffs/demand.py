"""D's side of a handoff: its demand, the messages that name it, and the offers for its prefix."""

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
class PrefixOffers:
    """The offers of a demand by prefix to its holders; operators see it, also after the end."""

    tokens: int
    """Tokens of the requested prefix."""
    revision: str = ""
    """Revision of the weights that computed the state."""
    left: list[EngineKey] = field(default_factory=list)
    """Engines that have not had the offer yet; the best is the last."""
    engine: EngineKey | None = None
    """The engine that has the offer now."""
    until_s: float = 0.0
    """When the next engine gets the offer."""
    made: int = 0
    declined: int = 0

    def close(self) -> None:
        """Stop offering."""
        self.left, self.engine = [], None


class Demand(NamedTuple):
    """What D asks for."""

    blocks: Mapping[str, bytes]
    held_tokens: int = 0
    position_tokens: int = 0
    """The position from which D continues; 0 if it accepts any."""
    content: bytes = b""
    """Identifies the content that D wants; empty if D named none."""
    prefix: NamedPrefix | None = None
    """The prefix to find among holders; None if a P was told to publish."""
    takes_sampled: bool = False
    """Whether D continues after the token that P sampled."""
    revision: str = ""
    """Revision of the weights that D computes with; empty: that of D's layout."""
    write_mark: int = 0
    """What agents wait for before they write, as in `Wish`."""

    size_bytes: int = 0
    """Bytes of block ids and hashes."""

    @classmethod
    def of(cls, wish: Wish, size_bytes: int = 0) -> Demand:
        """Return the demand of a wish, unchecked; its ids have ``size_bytes``."""
        prefix = wish.prefix
        return cls(
            dict(wish.blocks),
            wish.held_tokens,
            wish.position_tokens,
            wish.content if prefix is None else prefix.content,
            prefix,
            wish.takes_sampled,
            wish.revision,
            wish.write_mark,
            size_bytes + (0 if prefix is None else prefix.size_bytes),
        )

    @classmethod
    def checked(cls, handoff_id: str, lists: BlockLists, wish: Wish) -> Demand:
        """Return the demand of a wish, checked against D's ``lists``. Raises a `PagesError`."""
        seen: set[str] = set()
        size_bytes = 0
        for group, data in wish.blocks:
            lists.check_ids(group, data)
            if group in seen or len(data) > MAX_LIST_BYTES:
                raise PagesError(
                    f"handoff {handoff_id}: group {group} is listed more than once, or has more "
                    f"than {MAX_BLOCKS} blocks",
                    handoff=handoff_id,
                    group=group,
                )
            seen.add(group)
            size_bytes += len(data)
        demand = cls.of(wish, size_bytes)
        if lists.overlaid:
            lists.check_overlaid(demand.blocks)
        return demand

    def check_content(self, handoff_id: str, published: Publication) -> None:
        """Raise `ContentMismatchError` if the content of P's whole state differs from what D wants.

        If the positions differ, `misfit` refuses the demand for that instead.
        """
        named = self.prefix is not None or bool(published.content and self.content)
        differ = named and published.content != self.content
        if differ and self.position_tokens == published.position_tokens:
            raise ContentMismatchError(
                f"handoff {handoff_id}: P's and D's states differ in the first "
                f"{self.position_tokens} tokens, or in adapter, images or salt (D's content "
                f"{self.content[:8].hex()}, P's {published.content[:8].hex()}): send P and D the "
                f"same prompt with the same settings",
                handoff=handoff_id,
            )

    def fits_sampled(self, handoff_id: str, published: Publication) -> bool:
        """Return whether D accepts the token that P, having published the whole state, sampled."""
        if not self.takes_sampled or published.sampled_token is None:
            return False
        try:
            self.check_content(handoff_id, published)
        except ContentMismatchError:
            return False
        return self.position_tokens == published.position_tokens

    def without_blocks(self) -> Demand:
        """Return what is remembered of the demand after the end."""
        return Demand({}, *self[1:4], None, *self[5:8])

    @property
    def key(self) -> int:
        """Return a hash of the demand that clients cannot predict."""
        blocks = frozenset(self.blocks.items())
        return hash((blocks, self[1:4], self.takes_sampled, self.revision))


NO_DEMAND = Demand({})


def is_compared(published: Publication, wanted: Demand) -> bool:
    """Return whether both sides named the content of a state that is published whole."""
    return published.final and bool(published.content and wanted.content)


def content_compared(published: Publication, wanted: Demand) -> str:
    """Describe which side named the content, and whether it was compared."""
    if published.content and wanted.content:
        return "compared"
    if published.content or wanted.content:
        return f"named by {'P' if published.content else 'D'} alone"
    return "not named"


MAX_MESSAGES = 16
"""Messages that may state the same demand."""


@dataclass(slots=True, eq=False)
class DemandMessages:
    """The numbers of the messages that state a demand; calls have negative numbers.

    The number 0 stands for a message of a session that has no number. Telling the end under any
    other number tells it to all calls of the demand. Therefore only the latest call's number is
    kept, and only while no message of a session has a number of its own.
    """

    numbers: tuple[int, ...] = ()
    """Numbers under which the end is told, the earliest first."""
    given_up: tuple[int, ...] = ()
    """Numbers whose callers no longer wait."""

    def add(self, number: int) -> bool:
        """Add a message that states or repeats the demand; return False if there are too many."""
        kept = self.numbers
        if number in kept or (number < 0 and max(kept, default=0) > 0):
            return True
        if number:
            kept = tuple([known for known in kept if known >= 0])
        if len(kept) >= MAX_MESSAGES:
            return False
        self.numbers = (*kept, number)
        return True

    def give_up(self, number: int) -> bool:
        """Mark a message as given up; return whether all messages are given up."""
        given_up = {*self.given_up, number}
        self.given_up = tuple(known for known in self.numbers if known in given_up)
        return self.given_up == self.numbers
