"""Ends that a broker told one side before it died: the next broker completes the other side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.world import POSITION, Side, World, ends
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import HashForm, NamedPrefix
from restow.broker.core.ledger.known_ends import KEPT_S, MAX_KEPT

CONTENT = b"c" * 16
PREFIX = NamedPrefix(4, HashForm("test", 4, 32), "", bytes(32))


class Broker(World):
    """One life of a broker, to which the same lives of P, D and E come."""

    def __init__(self, d_agent: str = "d.0") -> None:
        super().__init__()
        self.p, self.d, self.e = (
            self.engine(name, agents=False, life=f"life of {name}") for name in "pde"
        )
        for side, agent in ((self.p, "p.0"), (self.d, d_agent), (self.e, "e.0")):
            if agent:
                self.connect(side, 0, name=agent)


def done(readers: int = 0, content: bytes = b"", sampled: int | None = None) -> Broker:
    """Return a broker under which D has the state, and E too where the state has two readers."""
    world = Broker()
    world.publish(world.p, readers=readers, content=content, sampled_token=sampled)
    world.fence(world.p)
    for side in (world.d, world.e)[: max(readers, 1)]:
        world.request(side, position=POSITION, content=content)
        for one in list(world.directory.ledger.by_number.values()):
            if one.granted:
                world.settle(side, one.number)
    assert ends(world.p) == ends(world.d) == [("DONE", "")]
    return world


def say_publication(world: Broker, **how: object) -> None:
    world.publish(world.p, repeated=True, **how)  # type: ignore[arg-type]


def say_demand(world: Broker, side: Side | None = None, number: int = 1, **how: object) -> None:
    world.request(side or world.d, position=POSITION, repeated=True, number=number, **how)  # type: ignore[arg-type]


def in_both_orders(world: Broker, *words: Callable[[], object], turned: bool) -> None:
    for word in reversed(words) if turned else words:
        word()


@pytest.mark.parametrize("turned", [True, False])
def test_p_has_its_pages_back_when_d_tells_that_it_has_the_state(turned: bool) -> None:
    (told,) = done(content=CONTENT).d.told
    world = Broker()
    tell = lambda: world.known_end(world.d, told)  # noqa: E731
    in_both_orders(world, lambda: say_publication(world, content=CONTENT), tell, turned=turned)
    assert ends(world.p) == [("DONE", "")]
    ended = world.p.told[0]
    assert (ended.delivered, ended.bytes, ended.position, ended.compared) == (1, 7, POSITION, True)
    assert not ends(world.d), "D was told"


@pytest.mark.parametrize("turned", [True, False])
def test_d_hears_that_it_has_the_state_when_p_tells(turned: bool) -> None:
    (told,) = done(content=CONTENT).p.told
    world = Broker()
    tell = lambda: world.known_end(world.p, told)  # noqa: E731
    in_both_orders(world, lambda: say_demand(world, content=CONTENT), tell, turned=turned)
    assert ends(world.d) == [("DONE", "")]
    ended = world.d.told[0]
    assert (ended.demand, ended.bytes, ended.position, ended.compared) == (1, 7, POSITION, True)


def test_d_hears_it_once_its_agents_are_back() -> None:
    (told,) = done().p.told
    world = Broker(d_agent="")
    say_demand(world)
    world.known_end(world.p, told)
    assert not ends(world.d)
    world.connect(world.d, 0, name="d.0")
    assert ends(world.d) == [("DONE", "")]


def test_a_demand_by_prefix_whose_end_is_known_is_not_offered_while_its_agents_are_away() -> None:
    first = Broker()
    first.publish(first.p)
    first.request(first.d)
    first.cancel(first.p)
    world = Broker(d_agent="")
    world.known_end(world.p, first.p.told[0])
    say_demand(world, prefix=PREFIX)
    assert not ends(world.d)
    world.connect(world.d, 0, name="d.0")
    assert ends(world.d) == [("CANCELLED", "CANCELLED")]


def test_d_hears_the_token_that_p_sampled_before_it_hears_the_end() -> None:
    (told,) = done(sampled=5).p.told
    world = Broker()
    say_demand(world, takes_sampled=True)
    actions = world.known_end(world.p, told)
    assert [type(one) for one in actions] == [act.TellSampled, act.TellEnded]
    assert actions[0].token == 5  # type: ignore[union-attr]


def test_a_failure_that_one_side_knows_ends_the_other() -> None:
    first = Broker()
    first.publish(first.p)
    first.request(first.d)
    first.cancel(first.p)
    for told, say in (
        (first.p.told[0], say_demand),
        (first.d.told[0], say_publication),
    ):
        world = Broker()
        say(world)
        world.known_end(world.d if told.demand else world.p, told)
        other = world.p if told.demand else world.d
        assert ends(other) == [("CANCELLED", "CANCELLED")]


# -- what an end must not end ---------------------------------------------------------------------


def test_ds_state_is_not_that_of_other_agents() -> None:
    (told,) = done().p.told
    world = Broker(d_agent="another process")
    say_demand(world)
    world.known_end(world.p, told)
    assert not ends(world.d)


def test_ds_state_is_in_no_agents_when_none_are_known() -> None:
    (told,) = done().p.told
    unknown = told.counterparts[0]._replace(agents=b"")
    world = Broker(d_agent="")
    say_demand(world)
    world.known_end(world.p, told._replace(counterparts=(unknown,)))
    world.connect(world.d, 0, name="another process")
    assert not ends(world.d)


@pytest.mark.parametrize("what", ["number", "life", "new", "published"])
def test_another_demand_is_not_done(what: str) -> None:
    (told,) = done().p.told
    world = Broker()
    if what == "life":
        world.d = world.engine("d", agents=False, life="another")
        world.connect(world.d, 0, name="d.0")
    if what == "published":
        world.publish(world.e)
    world.request(
        world.d, position=POSITION, repeated=what != "new", number=2 if what == "number" else 1
    )
    world.known_end(world.p, told)
    assert not ends(world.d)


@pytest.mark.parametrize("what", ["number", "life", "new", "unfinished", "asked for"])
def test_another_publication_does_not_end(what: str) -> None:
    (told,) = done().d.told
    world = Broker()
    if what == "life":
        world.p = world.engine("p", life="another")
    number, final = 8 if what == "number" else 7, what != "unfinished"
    world.publish(world.p, repeated=what != "new", number=number, final=final)
    if what == "asked for":
        world.request(world.e)
    world.known_end(world.d, told)
    assert not ends(world.p)
    assert not world.find().ended


def test_what_is_refused_to_d_is_no_end_of_ps() -> None:
    # P's state serves another demand.
    first = Broker()
    first.publish(first.p)
    first.fence(first.p)
    first.request(first.d, position=POSITION + 1)
    assert ends(first.d) == [("FAILED", "POSITION_MISMATCH")]
    assert not first.d.told[0].counterparts


# -- several readers ------------------------------------------------------------------------------


def test_readers_that_have_it_are_counted_again() -> None:
    first = done(readers=2)
    world = Broker()
    say_publication(world, readers=2)
    world.known_end(world.d, first.d.told[0])
    assert not ends(world.p)
    world.known_end(world.d, first.d.told[0])
    assert world.find().deliveries.done == 1, "one D is one reader, however often it tells"
    world.known_end(world.e, first.e.told[0])
    assert ends(world.p) == [("DONE", "")]
    assert world.p.told[0].delivered == 2


def test_readers_that_a_d_had_named_are_waited_for() -> None:
    first = Broker()
    first.publish(first.p)
    first.fence(first.p)
    first.request(first.d, readers=2)
    first.settle(first.d, next(iter(first.find().deliveries)).number)
    world = Broker()
    say_publication(world)
    world.known_end(world.d, first.d.told[0])
    assert not ends(world.p)
    world.decline(world.e, readers=2)
    assert ends(world.p) == [("DONE", "")]


def test_each_reader_hears_what_p_knows() -> None:
    (told,) = done(readers=2).p.told
    world = Broker()
    say_demand(world, world.d, readers=2)
    say_demand(world, world.e, readers=2)
    world.known_end(world.p, told)
    assert ends(world.d) == ends(world.e) == [("DONE", "")]


def test_a_reader_that_failed_takes_no_place() -> None:
    first = Broker()
    first.publish(first.p, readers=1)
    first.fence(first.p)
    first.request(first.d)
    first.cancel(first.d, demand=1)
    first.settle(first.d, next(iter(first.d.record.quarantined)))
    world = Broker()
    say_publication(world, readers=1)
    world.known_end(world.d, first.d.told[0])
    assert not ends(world.p)
    assert world.find().deliveries.has_place


def test_a_reader_that_declined_takes_one() -> None:
    first = Broker()
    first.publish(first.p, readers=1)
    first.decline(first.d, readers=1)
    world = Broker()
    say_publication(world, readers=1)
    world.known_end(world.d, first.d.told[0])
    assert ends(world.p) == [("CANCELLED", "DECLINED")]


# -- how long, and how many -----------------------------------------------------------------------


def test_an_end_is_not_kept_for_long() -> None:
    (told,) = done().d.told
    world = Broker()
    world.known_end(world.d, told)
    world.wait(KEPT_S + 0.1)
    say_publication(world)
    assert not ends(world.p)
    assert not world.directory.granting.known_ends.by_id


def test_no_more_ends_are_kept_than_there_is_room_for() -> None:
    (told,) = done().d.told
    world = Broker()
    known = world.directory.granting.known_ends
    other = told.counterparts[0]
    many = told._replace(counterparts=(other,) * 100)
    for _ in range(MAX_KEPT // 100 + 2):
        world.known_end(world.d, many)
    assert len(known) == MAX_KEPT
