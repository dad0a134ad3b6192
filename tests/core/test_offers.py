"""Demands by prefix at the core: what answers that come late, or in another way, do to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.world import BLOCK_TOKENS, Side, World, ends, layout
from restow.broker.core.common.events import Batch, HashForm, HashRun, NamedPrefix
from restow.broker.errors import (
    HandoffConflictError,
    PageRepeatedError,
    RequestError,
)
from restow.broker.layout import DType, Field, Kind, Layout, Model, Shard, Span

FORM = HashForm("test", BLOCK_TOKENS, 32)
HASHES = [bytes([number]) * 32 for number in (1, 2, 3)]
PREFIX = NamedPrefix(3 * BLOCK_TOKENS, FORM, "", b"".join(HASHES))
POSITION = PREFIX.position_tokens
WRONG = {"kv": [1, 1, 2], "state": [4]}


def holder(world: World, name: str) -> Side:
    """Add an engine that has told that it holds the state of the prefix."""
    side = world.engine(name, shape=_shape())
    world.directory.members.session_opened(side.record, world.now_s)
    runs = HashRun("kv", PREFIX.hashes), HashRun("state", HASHES[-1])
    world.run(lambda _: world.directory.prefixes.hear(side.record, Batch(1, FORM, "", runs)))
    return side


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


def asking(world: World) -> Side:
    d = world.engine("d", shape=_shape())
    world.directory.members.session_opened(d.record, world.now_s)
    world.request(d, prefix=PREFIX)
    return d


def offered(*sides: Side) -> list[int]:
    return [len(side.offered) for side in sides]


def publish(world: World, side: Side) -> None:
    world.publish(side, position=POSITION, content=PREFIX.content)


def test_an_answer_that_comes_too_late_and_is_refused_ends_nothing() -> None:
    world = World()
    a, b = holder(world, "a"), holder(world, "b")
    d = asking(world)
    assert offered(a, b) == [1, 0]
    world.wait(world.directory.limits.offer_s)
    assert offered(a, b) == [1, 1]
    assert isinstance(world.publish_refused(a, blocks=WRONG), PageRepeatedError)
    assert ends(d) == []
    publish(world, b)
    world.fence_all(b)
    assert world.find().granted


def test_an_answer_for_several_readers_is_refused_and_the_next_is_asked() -> None:
    world = World()
    a, b = holder(world, "a"), holder(world, "b")
    d = asking(world)
    assert isinstance(world.publish_refused(a, readers=2), RequestError)
    assert (ends(d), offered(a, b)) == ([], [1, 1])
    publish(world, b)
    world.fence_all(b)
    assert world.find().granted


@pytest.mark.parametrize("forks", [1, 6, 48])
def test_holders_share_the_readers_of_a_state(forks: int) -> None:
    world = World()
    sides = [holder(world, name) for name in "abcd"]
    d = world.engine("d0", shape=_shape())
    world.directory.members.session_opened(d.record, world.now_s)
    for number in range(forks):
        world.request(d, f"h{number}", prefix=PREFIX)
    counts = offered(*sides)
    assert sum(counts) == forks
    assert max(counts) - min(counts) <= 1


def test_a_d_is_not_offered_its_own_demand() -> None:
    # D may have evicted the state since it told that it holds the state.
    world = World()
    d = holder(world, "d")
    world.request(d, prefix=PREFIX)
    assert offered(d) == [0]
    assert ends(d) == [("CANCELLED", "NOT_HELD")]


def test_a_prefix_is_not_asked_for_under_an_id_that_several_wait_for() -> None:
    world = World()
    a, d, e = holder(world, "a"), world.engine("d"), world.engine("e")
    world.request(d, readers=2)
    with pytest.raises(HandoffConflictError):
        world.request(e, prefix=PREFIX)
    assert offered(a) == [0]
    world.check()


STEPS = ("asked for", "declined by one", "begun", "published", "granted", "read")


def up_to(step: str, world: World) -> tuple[Side, Side, Side]:
    """Play two holders and an asking D as far as ``step``; the second holder answers."""
    a, b = holder(world, "a"), holder(world, "b")
    d = asking(world)
    at = STEPS.index(step)
    if at >= STEPS.index("declined by one"):
        world.run(lambda now_s: world.directory.offering.decline(a.record, "h", "", now_s))
    if at >= STEPS.index("begun"):
        world.publish(b, blocks={"kv": [1, 2, 3]}, final=False)
    if at >= STEPS.index("published"):
        publish(world, b)
    if at >= STEPS.index("granted"):
        world.fence_all(b)
    if at >= STEPS.index("read"):
        world.settle(d, world.find().number)
    return a, b, d


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("who", ["d cancels", "d leaves", "its holder leaves", "an operator"])
def test_whoever_gives_a_demand_by_prefix_up_leaves_nothing(step: str, who: str) -> None:
    world = World()
    a, b, d = up_to(step, world)
    if who == "d cancels":
        world.cancel(d, demand=1)
    elif who == "d leaves":
        world.unregister(d)
    elif who == "its holder leaves":
        world.unregister(b)
    else:
        world.release(world.find())
    world.wait(0.02)
    world.wait(world.directory.limits.settle_grace_s + world.directory.limits.grant_s)
    ledger, offering = world.directory.ledger, world.directory.offering
    assert not ledger.live
    assert not ledger.by_number
    assert not offering.open
    assert len(ends(b)) == (STEPS.index(step) >= STEPS.index("begun"))
    assert not ends(a)
    if who != "d leaves":
        if d.record.quarantined:  # a rank of its may still write
            world.settle(d, next(iter(d.record.quarantined)))
        assert len(set(ends(d))) == 1


def test_a_decline_after_the_end_and_before_the_next_tick_ends_nothing_again() -> None:
    world = World()
    a = holder(world, "a")
    d = asking(world)
    world.cancel(d)
    offering = world.directory.offering
    assert not world.run(lambda now_s: offering.decline(a.record, "h", "evicted", now_s))
    world.wait(0.02)
    assert not offering.open
    assert ends(d) == [("CANCELLED", "CANCELLED")]
