"""A prefix by name: what a demand may ask for in place of what somebody has published."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from restow.broker.core.prefix.words import Chain, ChainEnd, HashForm
from restow.broker.layout.values import ModelIdentity

CONTENT_BYTES = 16


class NamedPrefix(NamedTuple):
    """The state after exactly so many tokens, known by their hashes.

    ``hashes`` are those of all whole quanta of them; ``end_hash`` is that of all tokens, where they
    are no whole number of quanta.
    """

    position_tokens: int
    form: HashForm
    salt: str
    hashes: bytes
    end_hash: bytes = b""
    revision: str = ""
    """Revision of the weights that computed it; empty: that of the layout of who names it."""

    @property
    def size_bytes(self) -> int:
        """Of its hashes."""
        return len(self.hashes) + len(self.end_hash)

    @property
    def last_hash(self) -> bytes:
        """That of all of its tokens."""
        return self.end_hash or self.hashes[-self.form.hash_bytes :]

    @property
    def content(self) -> bytes:
        """What a publication of it names as its content: the same in every broker's life."""
        named = json.dumps([*self.form, self.salt, self.position_tokens]).encode() + self.last_hash
        return hashlib.blake2b(named, digest_size=CONTENT_BYTES).digest()

    def chain(self, model: ModelIdentity) -> Chain:
        """It as what is looked up: of a holder's states the one at its end, or an earlier one."""
        ends = (ChainEnd(self.position_tokens, self.end_hash),) if self.end_hash else ()
        return Chain(model, self.form, self.salt, self.hashes, ends=ends)
