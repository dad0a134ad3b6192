"""Which of several brokers is asked next, where one of them knows what a call is about."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from restow.broker.addresses import checked_targets
from restow.broker.client.connection.errors import (
    BrokerCallError,
    BrokerUnreachableError,
    OtherServerError,
)
from restow.broker.errors import (
    AddressInvalidError,
    NotOwnerError,
    OwnerUnknownError,
    RestowError,
)

MAX_NAMED = 4
"""So many owners that brokers name are asked beside those that were given."""
NOT_KNOWN = "NOT_FOUND"


class Tries:
    """The brokers in turn, each once, until one answers or refuses for good. Iterate it."""

    def __init__(self, given: Sequence[str], first: str) -> None:
        """Begin with ``first``, and go on with those that were given."""
        self._left = deque([first, *given])
        self._tried: list[str] = []
        self._named = 0
        self._errors: list[tuple[str, RestowError]] = []
        self._final = False

    def __iter__(self) -> Iterator[str]:
        """Yield whom to ask now; say `failed` before the next one is taken."""
        while self._left and not self._final:
            address = self._left.popleft()
            if address not in self._tried:
                self._tried.append(address)
                yield address

    def failed(self, address: str, error: RestowError) -> None:
        """One did not answer, or refused: it may know nothing of it, or who does."""
        self._errors.append((address, error))
        if owner := _named_owner(error):
            if self._named < MAX_NAMED:
                self._named += 1
                self._left.appendleft(owner)
        elif not _others_may(error):
            self._final = True

    @property
    def unmet(self) -> tuple[str, RestowError]:
        """Whose error tells most, and the error."""
        return self._errors[-1] if self._final else most_telling(self._errors)


def most_telling(errors: Sequence[tuple[str, RestowError]]) -> tuple[str, RestowError]:
    """Who refused, rather than who did not answer; with the names of these."""
    silent = [one for one in errors if isinstance(one[1], BrokerUnreachableError)]
    refusals = [one for one in errors if not isinstance(one[1], BrokerUnreachableError)]
    if not refusals:
        return silent[0]
    address, error = min(refusals, key=lambda one: one[1].status != NOT_KNOWN)
    if not silent:
        return address, error
    words = f"{error.message}; no answer of {', '.join(one for one, _ in silent)}"
    told = BrokerCallError(error.status, error.reason, words)
    told.subject = error.subject
    return address, told


def _others_may(error: RestowError) -> bool:
    """Whether another broker may know what this one does not."""
    return (
        isinstance(error, BrokerUnreachableError | OtherServerError)
        or error.status == NOT_KNOWN
        or error.reason in (NotOwnerError.reason, OwnerUnknownError.reason)
    )


def _named_owner(error: RestowError) -> str:
    """The address that a refusal names; empty: none, or none that could be asked."""
    owner = error.subject.get("owner", "") if error.reason == NotOwnerError.reason else ""
    try:
        return owner if len(checked_targets(owner)) == 1 else ""
    except AddressInvalidError:
        return ""
