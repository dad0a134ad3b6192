"""The messages of D that say one demand: each is told the end."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGES = 16
"""Messages that may say one demand."""


@dataclass(slots=True, eq=False)
class DemandMessages:
    """By their messages' numbers.

    Calls have negative ones, and every call of a demand is told its end with any number: one is
    kept, and none beside a session's.
    """

    numbers: tuple[int, ...] = ()
    """Those that are told the end, first the one that was said first."""
    given_up: tuple[int, ...] = ()
    """Those of them that wait no longer."""

    def add(self, number: int) -> bool:
        """Take a message that says the demand, or says it again; False: it has too many."""
        of_sessions = tuple(one for one in self.numbers if one >= 0)
        if number in self.numbers or (number < 0 and of_sessions):
            return True
        if len(of_sessions) >= MAX_MESSAGES:
            return False
        self.numbers = (*of_sessions, number)
        return True

    def give_up(self, number: int) -> bool:
        """One waits no longer; False: another one does."""
        if number not in self.given_up:
            self.given_up = (*self.given_up, number)
        return len(self.given_up) == len(self.numbers)
