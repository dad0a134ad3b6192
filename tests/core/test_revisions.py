"""The weights of an engine are replaced while it lives: what becomes of all that it has open."""

from __future__ import annotations

import pytest

from core.test_offers import FORM, HASHES, POSITION, PREFIX, asking, holder, offered
from core.world import LIMITS, Side, World, alone, ends, p_and_d, p_d_and_e
from restow.broker.core.common.actions import SendUnfence, TellForget
from restow.broker.core.common.events import Batch, HashRun
from restow.broker.errors import HoldingsError, RequestError, RevisionChangedError

NEW = "v2"
REPLACED = ("FAILED", "REVISION_CHANGED")


def test_ps_unfinished_publications_end_and_whole_ones_are_read_by_the_old_revision() -> None:
    world, p, d, e = p_d_and_e()
    world.ready(p, "whole")
    world.publish(p, "unfenced")
    world.publish(p, "chunk", {}, final=False)
    world.request(d, "chunk")
    world.revise(p, NEW)
    assert ends(p) == [REPLACED, REPLACED]
    assert ends(d) == [REPLACED]
    world.request(e, "whole")
    world.settle(e, world.find("whole").number)
    assert ends(e) == [("DONE", "")]


def test_a_d_of_the_new_revision_does_not_take_the_old_state() -> None:
    world, p, d = p_and_d()
    world.ready(p)
    world.revise(p, NEW)
    world.revise(d, NEW)
    world.request(d, revision=NEW)
    assert ends(d) == ends(p) == [("FAILED", "MODEL_MISMATCH")]


@pytest.mark.parametrize("early", [False, True], ids=["waits", "reads"])
def test_ds_open_demands_end_when_its_weights_are_replaced(early: bool) -> None:
    world, p, d = p_and_d()
    world.request(d)
    if early:
        world.ready(p)
        number = world.find().number
    world.revise(d, NEW)
    if early:  # its rank still writes
        assert ends(d) == []
        world.settle(d, number)
    assert ends(d) == [REPLACED]


def test_engines_whose_weights_were_replaced_alike_hand_over() -> None:
    world, p, d = p_and_d()
    for side in (p, d):
        world.revise(side, NEW)
    world.ready(p, revision=NEW)
    world.request(d, revision=NEW)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_a_demand_that_is_said_again_under_the_old_revision_ends() -> None:
    world, d = alone("d")
    world.revise(d, NEW)
    world.request(d, repeated=True)
    assert ends(d) == [REPLACED]


def test_nothing_is_published_under_a_revision_that_p_has_no_longer() -> None:
    world, p = alone("p")
    world.revise(p, NEW)
    with pytest.raises(RevisionChangedError, match="of revision ''"):
        world.publish(p, repeated=True)
    assert world.directory.ledger.live == {}


def test_chunks_of_two_revisions_make_no_publication() -> None:
    world, p, d = p_and_d()
    world.ready(p)
    world.revise(p, NEW)
    with pytest.raises(RevisionChangedError, match="earlier chunks"):
        world.publish(p, revision=NEW)
    world.request(d)
    assert world.find().granted


def test_fences_from_before_count_for_no_publication_after() -> None:
    world, p, d = p_and_d()
    world.fence(p)
    world.revise(p, NEW)
    assert world.orders(SendUnfence) == [SendUnfence(p.agents[0].key, "h")]
    world.revise(d, NEW)
    world.publish(p, revision=NEW)
    world.request(d, revision=NEW)
    assert not world.find().granted


def test_to_say_the_same_revision_again_changes_nothing() -> None:
    world, p = alone("p")
    world.revise(p, NEW)
    world.publish(p, revision=NEW)
    assert world.revise(p, NEW) == []
    assert ends(p) == []


def test_what_is_held_of_the_old_revision_is_forgotten_and_offered_by_others() -> None:
    world = World()
    a, b, c = (holder(world, name) for name in "abc")
    asking(world)
    assert offered(a, b, c) == [1, 0, 0]
    world.revise(a, NEW)
    assert offered(a, b, c) == [1, 1, 0]
    world.revise(c, NEW)
    world.wait(LIMITS.offer_s)
    assert offered(a, b, c) == [1, 1, 0]
    find = world.directory.prefixes.find
    assert find("t", PREFIX.chain(b.record.identity(NEW))) == []
    assert [one.engine for one in find("t", PREFIX.chain(b.record.identity()))] == [b.record.key]


def tell(world: World, side: Side, number: int, revision: str) -> None:
    runs = HashRun("kv", PREFIX.hashes), HashRun("state", HASHES[-1])
    batch = Batch(number, FORM, "", runs, revision=revision)
    world.run(lambda _: world.directory.prefixes.hear(side.record, batch))


def test_an_engine_holds_only_what_is_of_its_revision() -> None:
    world = World()
    a = holder(world, "a")
    with pytest.raises(HoldingsError, match="of revision 'v2'"):
        tell(world, a, 2, NEW)
    world.revise(a, NEW)
    tell(world, a, 1, NEW)
    (found,) = world.directory.prefixes.find("t", PREFIX.chain(a.record.identity()))
    assert found.tokens == POSITION


def test_a_store_holds_and_gives_states_of_each_revision_apart() -> None:
    world = World()
    store = holder(world, "store")
    store.record.keeps = True
    d = asking(world)
    world.cancel(d)
    world.revise(d, NEW)
    world.request(d, "h2", prefix=PREFIX, revision=NEW)
    assert ends(d)[-1] == ("CANCELLED", "NOT_HELD")
    tell(world, store, 2, NEW)
    world.request(d, "h3", prefix=PREFIX, revision=NEW)
    asked = store.offered[-1].prefix
    assert (asked.revision, asked.hashes) == (NEW, PREFIX.hashes)
    world.publish(store, "h3", position=POSITION, content=PREFIX.content, revision=NEW)
    world.fence(store, name="h3")
    world.settle(d, world.find("h3").number)
    assert ends(d)[-1] == ("DONE", "")


def test_a_store_asks_for_states_of_any_revision_and_has_none_of_its_own() -> None:
    world = World()
    p, store = holder(world, "p"), holder(world, "store")
    store.record.keeps = True
    world.revise(p, NEW)
    tell(world, p, 1, NEW)
    world.run(lambda _: world.directory.offering.keep(p.record, PREFIX))
    assert store.offered == []  # of the revision that P has no longer
    named = PREFIX._replace(revision=NEW)
    world.run(lambda _: world.directory.offering.keep(p.record, named))
    assert store.offered[-1].prefix == named
    world.request(store, prefix=PREFIX, revision=NEW)
    assert len(p.offered) == 1
    with pytest.raises(RequestError, match="is a store"):
        world.revise(store, "v3")


def test_stores_are_told_to_drop_a_revision_those_of_a_tenant_or_of_one_model() -> None:
    world = World()
    a, b = holder(world, "a"), holder(world, "b")
    a.record.keeps = True
    forget = world.directory.offering.forget_states
    assert forget("t", "v1") == [TellForget(a.record.key, "v1")]
    assert forget("other", "v1") == []
    world.directory.members.session_closed(a.record, world.now_s)
    assert forget("t", "v1") == []
    assert not b.record.keeps
