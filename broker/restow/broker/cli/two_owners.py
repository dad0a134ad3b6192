"""`two_owners` finds pools that more than one broker owns, in what brokers tell of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from restow.v1 import admin_pb2 as pb


class Owned(NamedTuple):
    """A broker's word that a pool is its own; of one that is alone, in epoch 0."""

    pool: str
    address: str
    epoch: int


class TwoOwners(NamedTuple):
    """A broker acts in a pool that is another one's, or the same epoch has two."""

    one: Owned
    other: Owned

    def __str__(self) -> str:
        """For people."""
        each = (f"{at.address} in {_epoch(at.epoch)}" for at in self)
        return f"{self.one.pool} has two owners: {' and '.join(each)}"


def two_owners(told: Mapping[str, pb.ListBrokersResponse]) -> set[TwoOwners]:
    """Return all, of what each broker told at its address.

    One that stands still acts in no pool, whatever it believes. What was asked of one broker is
    older than what was asked of the next: only what is found twice, one after the other, is so.
    """
    newest: dict[str, Owned] = {}
    acting: list[Owned] = []
    for address, answer in told.items():
        still = answer.membership.HasField("still_s")
        for pool in answer.pools:
            name = _name(pool)
            if pool.own and still:
                continue
            one = Owned(name, pool.owner or address, pool.epoch)
            if pool.own:
                acting.append(one)
            if (pool.own or pool.epoch) and one.epoch >= newest.get(name, one).epoch:
                newest[name] = one
    return {
        TwoOwners(one, newest[one.pool])
        for one in acting
        if (one.address, one.epoch) != (newest[one.pool].address, newest[one.pool].epoch)
    }


def _name(pool: pb.PoolInfo) -> str:
    parts = (pool.model, pool.revision, pool.adapter, pool.quantisation)
    return f"pool {pool.tenant}/{' '.join(filter(None, parts))}"


def _epoch(epoch: int) -> str:
    return f"epoch {epoch}" if epoch else "none, for it is alone"
