"""Which of several brokers to ask."""

from __future__ import annotations

from restow.broker.addresses import checked_targets
from restow.broker.errors import AddressInvalidError, NotOwnerError, RestowError

UNREACHED_KEY = "restow-unreached"
"""Metadata of a call: the address that another broker had named, where nobody answers."""
MAX_HOPS = 4
"""So often one broker's word on another is followed at once: two may know different things."""


class Brokers:
    """The brokers that were given, and the one that another named as the owner of our pool."""

    def __init__(self, given: str) -> None:
        """Begin with the first of ``HOST:PORT,...``. Raises `AddressInvalidError`."""
        self._given = checked_targets(given)
        self._next = 0
        self._owner = self._unreached = ""
        self._hops = self._failed = 0
        self.rounds = 0
        """How often all have failed, one after the other, since one let us in."""

    @property
    def current(self) -> str:
        """The address to ask now."""
        return self._owner or self._given[self._next]

    @property
    def several(self) -> bool:
        """Whether there is another one to ask where one does not answer."""
        return bool(self._owner) or len(self._given) > 1

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call goes with that asks to be let in."""
        return ((UNREACHED_KEY, self._unreached),) if self._unreached else ()

    def works(self) -> None:
        """The current one has let us in."""
        self._hops = self._failed = self.rounds = 0
        self._unreached = ""

    def failed(self) -> bool:
        """Take another one, for this one is of no use now; returns whether to ask it at once.

        Not when all have failed, one after the other.
        """
        if self._owner:
            self._owner, self._unreached = "", self._owner
            return True  # who named it waits with us until it has another answer
        self._next = (self._next + 1) % len(self._given)
        self._failed += 1
        if self._failed < len(self._given):
            return True
        self._failed = 0
        self.rounds += 1
        return False

    def refused(self, error: RestowError) -> bool:
        """Whether a broker's refusal names another one, which is to be asked at once."""
        if error.reason != NotOwnerError.reason:
            return False
        owner = error.subject.get("owner", "")
        try:
            known = len(checked_targets(owner)) == 1
        except AddressInvalidError:
            known = False
        self._hops += 1
        if not known or owner == self._unreached or self._hops > MAX_HOPS:
            self._hops = 0
            self._owner = self._unreached = ""
            return False
        self._owner = owner
        return True
