"""The messages of D that say one demand: each is told the end."""

from __future__ import annotations

from dataclasses import dataclass

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
