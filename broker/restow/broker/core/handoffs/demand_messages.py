"""The messages of D that say one demand: each is told the end."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGES = 16
"""Messages that may say one demand."""


@dataclass(slots=True, eq=False)
class DemandMessages:
    """By their messages' numbers.

    Calls have negative ones, and every call of a demand is told its end with any number but 0,
    which a session's message has that has none: one is kept, and none beside a session's other one.
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
        if number not in self.given_up:
            self.given_up = (*self.given_up, number)
        return len(self.given_up) == len(self.numbers)
