"""Who owns a pool, and who shall."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from restow.broker.layout.values import Pool


@dataclass(frozen=True, slots=True)
class Claim:
    """A pool's key in the registry: who owns it, by which lease, and since when."""

    address: str
    lease: int
    epoch: int
    """The revision that made it: a pool's next claim has a higher one."""


def chosen(pool: Pool, addresses: Iterable[str]) -> str | None:
    """The member that is to own a pool; None: there is nobody.

    Every member finds the same one (rendezvous hashing). When one comes or goes, only its own
    pools have another.

    >>> from restow.broker.layout.values import ModelIdentity, Pool
    >>> pool = Pool("a", ModelIdentity("m"))
    >>> chosen(pool, ["x:1", "y:1"]) == chosen(pool, ["y:1", "x:1"])
    True
    """
    name = "\0".join((pool.tenant, *astuple(pool.model))).encode()
    return max(addresses, key=lambda address: _weight(name, address), default=None)


def _weight(name: bytes, address: str) -> tuple[bytes, str]:
    # The name goes into the key, which is as long as that of BLAKE2b may be.
    key = hashlib.blake2b(name, digest_size=32).digest()
    return hashlib.blake2b(address.encode(), key=key, digest_size=16).digest(), address
