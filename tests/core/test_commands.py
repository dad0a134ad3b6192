"""Commands about states: each ends once, in time, and at the store that was asked last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.test_offers import PREFIX, holder
from core.world import Side, World
from restow.broker.core.commands import (
    KEPT_S,
    MAX_KNOWN,
    MAX_OPEN,
    Commands,
    Given,
)
from restow.broker.core.common.actions import SendCommand, TellCommand
from restow.broker.core.common.events import Command
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import CommandConflictError, CommandUnknownError, QuotaExceededError
from restow.broker.state_commands import Answer, Outcome, Verb

LATE_S = 30.0
PIN_S = 100.0
DONE = Answer(Outcome.DONE, PREFIX.position_tokens, left_s=PIN_S)


def command(name: str = "c", verb: Verb = Verb.PREFETCH, **how: object) -> Command:
    whole = Command(name, verb, EngineKey("t", "a"), PREFIX, LATE_S)
    return whole._replace(**how)  # type: ignore[arg-type]


class Stores:
    """Two stores, and an engine that is none."""

    def __init__(self) -> None:
        self.world = World()
        self.a, self.b, self.p = (holder(self.world, name) for name in "abp")
        self.a.record.keeps = self.b.record.keeps = True

    @property
    def commands(self) -> Commands:
        return self.world.directory.commands

    def give(self, given: Command) -> Given:
        kept: list[Given] = []

        def begin(now_s: float) -> list[object]:
            one, actions = self.commands.give(given, now_s)
            kept.append(one)
            return list(actions)

        self.world.run(begin)  # type: ignore[arg-type]
        return kept[0]

    def answer(self, side: Side, name: str = "c", answer: Answer = DONE) -> None:
        self.world.run(lambda now_s: self.commands.answered(side.record, name, answer, now_s))

    def orders(self) -> Iterator[tuple[str, Verb]]:
        for order in self.world.orders(SendCommand):
            yield order.engine.engine_id, order.verb

    def ends(self) -> list[Answer]:
        return [told.answer for told in self.world.orders(TellCommand)]


@pytest.fixture
def stores() -> Stores:
    return Stores()


def test_a_repeated_command_changes_nothing_and_another_with_its_id_is_refused(
    stores: Stores,
) -> None:
    given = stores.give(command())
    assert stores.give(command(timeout_s=1.0)) is given
    stores.answer(stores.a)
    assert stores.give(command()) is given
    assert given.answer == DONE
    assert list(stores.orders()) == [("a", Verb.PREFETCH)]
    other = PREFIX._replace(salt="other")
    for contradiction in (
        command(verb=Verb.EVICT),
        command(prefix=other),
        command(engine=EngineKey("t", "b")),
        command(verb=Verb.PIN, for_s=1.0),
    ):
        with pytest.raises(CommandConflictError):
            stores.give(contradiction)
    assert stores.commands.find("t", "c") is given
    for tenant, name in (("t", "d"), ("u", "c")):
        with pytest.raises(CommandUnknownError):
            stores.commands.find(tenant, name)


def test_a_command_without_a_revision_is_the_same_when_its_store_has_come(stores: Stores) -> None:
    unnamed = command(prefix=PREFIX._replace(revision=""), engine=EngineKey("t", "later"))
    given = stores.give(unnamed)
    assert given.answer.reason == "ENGINE_UNKNOWN"
    later = holder(stores.world, "later")
    later.record.keeps = True
    assert stores.give(unnamed) is given
    stores.give(unnamed._replace(command_id="d"))
    stores.world.unregister(later)
    assert stores.give(unnamed._replace(command_id="d")).command.prefix.revision


def test_an_answer_counts_once_and_only_from_the_store_that_was_asked(stores: Stores) -> None:
    given = stores.give(command())
    for side, name in ((stores.b, "c"), (stores.p, "c"), (stores.a, "d")):
        stores.answer(side, name)
    assert given.open
    stores.answer(stores.a, answer=Answer(Outcome.MISSING, 0, "NOT_HELD", "nobody"))
    stores.answer(stores.a)
    assert stores.ends() == [Answer(Outcome.MISSING, 0, "NOT_HELD", "nobody")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (command(engine=EngineKey("t", "nobody")), "ENGINE_UNKNOWN"),
        (command(engine=EngineKey("u", "a")), "ENGINE_UNKNOWN"),
        (command(engine=EngineKey("t", "p")), "NO_STORE"),
        (command(verb=Verb.MOVE, target=EngineKey("t", "p")), "NO_STORE"),
        (command(verb=Verb.MOVE, target=EngineKey("t", "a")), "SAME_STORE"),
        (command(verb=Verb.MOVE), "SAME_STORE"),
        (command(verb=Verb.MOVE, engine=EngineKey("t", "nobody")), "ENGINE_UNKNOWN"),
    ],
)
def test_what_no_store_can_do_is_refused_at_once(
    stores: Stores, given: Command, reason: str
) -> None:
    assert stores.give(given).answer.reason == reason
    assert list(stores.orders()) == []


def test_a_store_that_drains_gets_nothing_and_gives_things_up(stores: Stores) -> None:
    stores.world.drain_engine(stores.a)
    for verb in (Verb.PREFETCH, Verb.PIN):
        assert stores.give(command(verb, verb, for_s=1.0)).answer.reason == "ENGINE_DRAINING"
    for verb in (Verb.RELEASE, Verb.EVICT):
        assert stores.give(command(verb, verb)).open
    assert stores.give(command("m", Verb.MOVE, target=EngineKey("t", "b"))).open


def test_replies_of_an_engine_move_at_its_word_also_while_it_drains(stores: Stores) -> None:
    for name in ("c", "again"):
        assert stores.give(command(name, Verb.MOVE, engine=stores.p.record.key)).open
        assert list(stores.orders())[-1] == ("p", Verb.MOVE)
        stores.answer(stores.p, name)
        assert stores.ends()[-1] == DONE
        stores.world.drain_engine(stores.p)


def test_a_move_drops_the_state_only_when_the_other_store_has_it(stores: Stores) -> None:
    move = command(verb=Verb.MOVE, target=stores.b.record.key)
    stores.give(move)
    stores.answer(stores.a)  # which was not asked yet
    assert list(stores.orders()) == [("b", Verb.PREFETCH)]
    stores.answer(stores.b)
    assert list(stores.orders()) == [("b", Verb.PREFETCH), ("a", Verb.EVICT)]
    stores.answer(stores.b)
    assert stores.ends() == []
    stores.answer(stores.a)
    assert stores.ends() == [DONE]
    for outcome in (Outcome.REFUSED, Outcome.MISSING, Outcome.CLIPPED):
        stores.give(move._replace(command_id=outcome.value))
        stores.answer(stores.b, outcome.value, Answer(outcome))
    assert list(stores.orders()).count(("a", Verb.EVICT)) == 1


def test_a_late_command_is_refused_and_a_late_pin_is_released(stores: Stores) -> None:
    stores.give(command("one"))
    stores.give(command("two", Verb.PIN, for_s=PIN_S))
    stores.world.wait(LATE_S + 1)
    assert [end.reason for end in stores.ends()] == ["COMMAND_LATE"] * 2
    assert list(stores.orders())[-1] == ("a", Verb.RELEASE)
    before = len(list(stores.orders()))
    stores.world.run(lambda _: stores.commands.session_opened(stores.a.record))
    assert list(stores.orders())[before:] == [("a", Verb.RELEASE)], "its stream may have lost it"
    (*_, again) = stores.world.orders(SendCommand)
    assert (again.command.command_id, again.command.prefix.hashes) == ("two", PREFIX.hashes)
    stores.answer(stores.a, "two")
    assert stores.commands.find("t", "two").left_s(stores.world.now_s) == 0


def test_a_store_that_comes_back_hears_what_it_has_not_answered(stores: Stores) -> None:
    stores.give(command("one"))
    stores.give(command("two"))
    stores.answer(stores.a, "one")
    stores.world.run(lambda _: stores.commands.session_opened(stores.a.record))
    stores.world.run(lambda _: stores.commands.session_opened(stores.b.record))
    assert list(stores.orders()) == [("a", Verb.PREFETCH)] * 3
    assert [one.command.command_id for one in stores.world.orders(SendCommand)][-1] == "two"


def test_commands_and_pins_end_with_their_store(stores: Stores) -> None:
    pin = stores.give(command("pin", Verb.PIN, for_s=PIN_S))
    stores.answer(stores.a, "pin")
    assert pin.left_s(stores.world.now_s) == PIN_S
    stores.give(command("open"))
    stores.world.unregister(stores.a)
    stores.world.wait(0.1)
    assert stores.ends()[-1].reason == "ENGINE_LOST"
    assert pin.left_s(stores.world.now_s) == 0


def test_a_pin_ends_by_itself_or_by_a_release_of_the_same_state(stores: Stores) -> None:
    pins = [stores.give(command(name, Verb.PIN, for_s=PIN_S)) for name in "pqr"]
    for name in "pqr":
        stores.answer(stores.a, name)
    stores.world.wait(PIN_S / 2)
    assert {pin.left_s(stores.world.now_s) for pin in pins} == {PIN_S / 2}
    stores.give(command("other", Verb.RELEASE, prefix=PREFIX._replace(salt="other")))
    stores.answer(stores.a, "other")
    assert pins[0].left_s(stores.world.now_s)
    stores.give(command("same", Verb.RELEASE))
    stores.answer(stores.a, "same")
    assert {pin.left_s(stores.world.now_s) for pin in pins} == {0}


@pytest.mark.parametrize(
    ("said_s", "left_s"), [(PIN_S / 4, PIN_S / 4), (2 * PIN_S, PIN_S), (-1, 0)]
)
def test_a_pin_lasts_as_long_as_its_store_says(
    stores: Stores, said_s: float, left_s: float
) -> None:
    pin = stores.give(command(verb=Verb.PIN, for_s=PIN_S))
    stores.answer(stores.a, answer=replace(DONE, left_s=said_s))
    assert pin.left_s(stores.world.now_s) == left_s


def test_a_release_ends_no_command_of_its_state_that_is_being_carried_out(stores: Stores) -> None:
    fetched = stores.give(command("fetch"))
    stores.give(command("release", Verb.RELEASE))
    stores.answer(stores.a, "release")
    stores.world.wait(1.0)
    assert fetched.open


def test_commands_are_limited_and_forgotten_long_after_their_end(stores: Stores) -> None:
    for number in range(MAX_OPEN):
        stores.give(command(str(number)))
    with pytest.raises(QuotaExceededError):
        stores.give(command("more"))
    stores.answer(stores.a, "0")
    stores.give(command("more"))
    stores.world.wait(LATE_S + 1)
    stores.world.wait(KEPT_S - LATE_S - 2)
    assert stores.commands.find("t", "1")
    stores.world.wait(LATE_S + 3)
    with pytest.raises(CommandUnknownError):
        stores.commands.find("t", "1")
    for number in range(MAX_KNOWN + 10):
        stores.give(command(str(number)))
        stores.answer(stores.a, str(number))
    assert len(stores.commands.tenants["t"].by_id) == MAX_KNOWN


NAMES = st.sampled_from("cdef")
VERBS = st.sampled_from(list(Verb))
SIDES = st.sampled_from("abp")
OUTCOMES = st.sampled_from([one for one in Outcome if one is not Outcome.ACCEPTED])


class Machine(RuleBasedStateMachine):
    """Callers and stores say anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = Stores()
        self.given: dict[str, Given] = {}

    @rule(name=NAMES, verb=VERBS, engine=SIDES, other=st.none() | SIDES)
    def give(self, name: str, verb: Verb, engine: str, other: str | None) -> None:
        to = EngineKey("t", other) if verb is Verb.MOVE and other is not None else None
        wanted = command(name, verb, engine=EngineKey("t", engine), target=to, for_s=PIN_S)
        try:
            self.given[name] = self.stores.give(wanted)
        except CommandConflictError:
            assert name in self.given

    @rule(name=NAMES, engine=SIDES, outcome=OUTCOMES)
    def answer(self, name: str, engine: str, outcome: Outcome) -> None:
        self.stores.answer(self.stores.world.side(engine), name, Answer(outcome))

    @rule(engine=SIDES)
    def come_back(self, engine: str) -> None:
        side = self.stores.world.side(engine)
        self.stores.world.run(lambda _: self.stores.commands.session_opened(side.record))

    @rule(seconds=st.sampled_from([0.1, LATE_S, PIN_S, KEPT_S]))
    def wait(self, seconds: float) -> None:
        self.stores.world.wait(seconds)

    @invariant()
    def every_command_ends_once_and_in_time(self) -> None:
        world = self.stores.world
        told = [one.command.command_id for one in world.orders(TellCommand)]
        for name, given in self.given.items():
            ended = told.count(name)
            assert ended >= (not given.open), f"{name} has ended, and nobody was told"
            assert given.open <= (given.until_s > world.now_s)
        known = self.stores.commands.tenants.get("t")
        if known is not None:
            names = [one.command.command_id for one in known.ended]
            assert sorted([*names, *known.open]) == sorted(known.by_id)
            assert known.open_bytes == PREFIX.size_bytes * len(known.open)

    @invariant()
    def a_source_is_told_to_evict_only_after_the_target_has_the_state(self) -> None:
        held: set[str] = set()
        for sent in self.stores.world.sent:
            if isinstance(sent, SendCommand) and sent.command.target is not None:
                if sent.verb is Verb.PREFETCH:
                    held.add(sent.command.command_id)
                else:
                    assert sent.command.command_id in held


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
