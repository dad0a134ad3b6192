"""`TellingClient` is the client of commands: it tells which of several brokers did not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from restow.broker.client.admin import AdminClient
from restow.broker.printable import shown


class TellingClient(AdminClient):
    """Tells that on stderr in the end: what those have is missing in what was printed."""

    def each(self) -> Iterator[AdminClient]:
        """Yield a client of each broker by itself; but of those that did not answer just now."""
        for address in self.addresses:
            if address not in self.unanswered:
                with self.one(address) as client:
                    yield client

    def one(self, address: str) -> AdminClient:
        """Return a client of the broker at an address, with the same credentials."""
        return AdminClient(address, credentials=self._credentials)

    def __exit__(self, *_: object) -> None:
        """Close, and tell."""
        super().__exit__()
        for address, error in self.unanswered.items():
            words = shown(f"{address} is left out, for it does not answer: {error.message}")
            sys.stderr.write(f"{words}\n")
