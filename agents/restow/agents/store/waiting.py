"""`Waiting` are states that a store is to ask for, as soon as fewer are on their way."""

from __future__ import annotations

import threading
from collections import OrderedDict

from restow.broker.client import Prefix

MAX_HASHES = 1 << 18
"""Of all that wait: about 20 MB. Of longer prompts fewer wait."""


class Waiting:
    """Those told of first come first; of too many the first ones are dropped. Any thread."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        """Nothing waits."""
        self.dropped = 0
        """How many waited in vain."""
        self._max_hashes = max_hashes
        self._hashes = 0
        self._prefixes: OrderedDict[Prefix, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Have a state wait, if it does not yet."""
        with self._lock:
            if prefix in self._prefixes:
                return
            self._prefixes[prefix] = None
            self._hashes += _size(prefix)
            while self._hashes > self._max_hashes:
                dropped, _ = self._prefixes.popitem(last=False)
                self._hashes -= _size(dropped)
                self.dropped += 1

    def take(self) -> Prefix | None:
        """The one that waited longest; None: none does."""
        with self._lock:
            if not self._prefixes:
                return None
            prefix, _ = self._prefixes.popitem(last=False)
            self._hashes -= _size(prefix)
            return prefix


def _size(prefix: Prefix) -> int:
    return len(prefix.hashes) + 1
