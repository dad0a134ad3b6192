"""An offer's answer that comes when the demand has ended, and before the next tick."""

from __future__ import annotations

from dataclasses import replace

from core.world import BLOCK_TOKENS, World, ends, layout
from restow.broker.core.common.events import Batch, HashForm, HashRun, NamedPrefix
from restow.broker.layout import DType, Field, Kind, Layout, Model, Shard, Span

FORM = HashForm("test", BLOCK_TOKENS, 32)
HASHES = [bytes([number]) * 32 for number in (1, 2, 3)]
PREFIX = NamedPrefix(3 * BLOCK_TOKENS, FORM, "", b"".join(HASHES))


def _shape() -> Layout:
    """Return the layout of `layout(1)`, with the fields and shards that its groups hold."""
    whole = layout(1)
    fields = (Field("k", Kind.PER_TOKEN, ("dim",), (8,)), Field("s", Kind.SNAPSHOT, ("dim",), (8,)))
    shards = (
        Shard("k", (Span(0, 8),), DType.FLOAT32, "kv", 0, (4,), 32),
        Shard("s", (Span(0, 8),), DType.FLOAT32, "state", 0, (4,)),
    )
    ranks = tuple(replace(rank, shards=shards) for rank in whole.ranks)
    return replace(whole, model=Model("m", fields, revision="v1"), ranks=ranks)


def test_a_decline_after_the_end_and_before_the_next_tick_ends_nothing_again() -> None:
    world = World()
    holder, d = (world.engine(name, shape=_shape()) for name in ("p", "d"))
    members, offering = world.directory.members, world.directory.offering
    for side in (holder, d):
        members.session_opened(side.record, world.now_s)
    runs = HashRun("kv", PREFIX.hashes), HashRun("state", HASHES[-1])
    batch = Batch(1, FORM, "", runs)
    world.run(lambda _: world.directory.prefixes.hear(holder.record, batch))
    world.request(d, prefix=PREFIX)
    assert len(holder.offered) == 1
    world.cancel(d)
    assert not world.run(lambda now_s: offering.decline(holder.record, "h", "evicted", now_s))
    world.wait(0.02)
    assert not offering.open
    assert ends(d) == [("CANCELLED", "CANCELLED")]
