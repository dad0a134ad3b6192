"""The deliveries of a publication that is for several readers, or that outlives a failed one.

readers 2    D1 asks ---- DONE            places taken: those that read, are DONE or did without
             D2 asks ------- FAILED       takes none
             D3 asks ..(waits)..---- DONE P is told, and has its pages back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from restow.broker.core.actions import EngineKey, State

if TYPE_CHECKING:
    from restow.broker.core.handoffs.handoff import Handoff

MAX_READERS = 64
MAX_DELIVERIES = 128
"""Of one publication, live or remembered."""


@dataclass(slots=True, eq=False)
class Deliveries:
    """What became of each D that asked, and how many readers the publication has."""

    readers: int = 0
    """How many must have the state before P's pages are free; 0: nobody named any, and the handoff
    is its own one delivery."""
    by_engine: dict[EngineKey, Handoff] = field(default_factory=dict)
    """The latest of each D."""
    done: int = 0
    declined: int = 0
    """Readers that did without."""

    def __iter__(self) -> Iterator[Handoff]:
        """Those that have not ended, the one first that asked first."""
        if not self.by_engine:  # most handoffs have none
            return iter(())
        return iter([one for one in self.by_engine.values() if not one.ended])

    @property
    def reading(self) -> list[Handoff]:
        """Those that are granted."""
        return [one for one in self if one.granted]

    @property
    def has_place(self) -> bool:
        """Whether another one may read."""
        return self.done + self.declined + len(self.reading) < self.readers

    @property
    def served(self) -> bool:
        """Whether readers were named, and each has it or does without."""
        return 0 < self.readers <= self.done + self.declined

    def has_room(self) -> bool:
        """Make room for one more; False: too many are kept that must be."""
        if len(self.by_engine) >= MAX_DELIVERIES:
            ended = self.by_engine.items()
            lost = next((k for k, one in ended if one.ended and one.state is not State.DONE), None)
            if lost is None:
                return False
            del self.by_engine[lost]
        return True

    def count(self, delivery: Handoff) -> None:
        """One has ended. A decline takes no place from those that read."""
        if delivery.failure is None:
            self.done += 1
        elif is_served(delivery) and self.has_place:
            self.declined += 1

    def in_words(self) -> str:
        """How many have it, and who reads."""
        words = f"{self.done} of {self.readers} readers have it"
        if self.declined:
            words += f", {self.declined} did without"
        if names := [key.engine_id for key, one in self.by_engine.items() if one.granted]:
            words += f", read by {' and '.join(names)}"
        return words


def is_served(delivery: Handoff) -> bool:
    """Whether D needs an ended one no more: it has the state, or does without."""
    failure = delivery.failure
    return delivery.ended and (failure is None or failure.reason == "DECLINED")
