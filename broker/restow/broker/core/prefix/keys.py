"""Keys: what stands for a hash in here, with all else that a prefix is known by."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Self

import numpy as np

from restow.broker.core.prefix.words import MAX_HASH_BYTES, HashForm
from restow.broker.layout.values import ModelIdentity

KEY_BYTES = 8
_SPARE_BITS = 4
"""Keys have 60 bits: Python's integers of so many take a third less than those of 64."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Those of hashes in a row, as integers and as 8 bytes each."""

    values: list[int]
    raw: bytes

    def __len__(self) -> int:
        """How many."""
        return len(self.values)

    def distinct(self) -> Self:
        """These without what came before among them."""
        values = list(dict.fromkeys(self.values))
        if len(values) == len(self.values):
            return self
        return type(self)(values, np.array(values, "<u8").tobytes())


class Keyer:
    """Makes keys. Two hashes of a tenant share one by chance, once in 2**60 pairs.

    Then a state may be found that is not held. It is asked for by its hash, and declined.
    """

    def __init__(self, secret: bytes) -> None:
        """``secret`` keeps others from choosing hashes that meet; it is that of one broker."""
        self._secret = secret
        drawn = hashlib.blake2b(b"factors", key=secret, digest_size=MAX_HASH_BYTES).digest()
        self._factors = np.frombuffer(drawn, "<u8") | np.uint64(1)

    def keys(self, model: ModelIdentity, form: HashForm, salt: str, hashes: bytes) -> Keys:
        """The keys of ``hashes``: other ones for another model, form or salt."""
        named = json.dumps([model.name, model.revision, model.adapter, model.quantisation])
        named += json.dumps([*form, salt])
        seed = hashlib.blake2b(named.encode(), key=self._secret, digest_size=KEY_BYTES).digest()
        words = np.frombuffer(hashes, "<u8").reshape(-1, form.hash_bytes // KEY_BYTES)
        mixed = words ^ (words >> np.uint64(31))
        mixed = mixed * self._factors[: words.shape[1]]
        mixed ^= mixed >> np.uint64(29)
        summed = mixed.sum(axis=1, dtype=np.uint64) + np.frombuffer(seed, "<u8")
        keys = (summed * self._factors[0]) >> np.uint64(_SPARE_BITS)
        return Keys(keys.tolist(), keys.astype("<u8").tobytes())
