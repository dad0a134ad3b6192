"""The normal path of a handoff through the core, and its repetitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from core.world import World, alone, ends, kinds, of_kind, p_and_d, p_d_and_e, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import Counterpart, EngineKey, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import PairRefused
from restow.broker.errors import (
    DirectoryFullError,
    HandoffConflictError,
    HandoffOwnedError,
    HandoffUnknownError,
    ModelMismatchError,
)

P, D = EngineKey("t", "p"), EngineKey("t", "d")
STEPS: dict[str, Callable[[World], object]] = {
    "publish": lambda world: world.publish(world.side("p")),
    "fence 0": lambda world: world.fence(world.side("p"), 0),
    "fence 1": lambda world: world.fence(world.side("p"), 1),
    "request": lambda world: world.request(world.side("d")),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids=" then ".join)
def test_every_order_of_arrival_ends_done_with_the_same_actions(order: tuple[str, ...]) -> None:
    world, p, d = p_and_d(2, 2)
    for step in order[:-1]:
        assert not world.orders(act.SendExecute)
        STEPS[step](world)
    STEPS[order[-1]](world)
    number = world.find().number
    executes = world.orders(act.SendExecute)
    assert [e.agent.rank for e in executes if isinstance(e, act.SendExecute)] == [0, 1]
    assert kinds(world.sent) == [
        "MakePlan",
        *["SendProgram", "SendPeer", "SendPeer", "SendExecute"] * 2,
    ]
    assert world.settle(d, number, 0) == []
    assert kinds(world.settle(d, number, 1)) == ["TellEnded", "TellEnded"]
    assert ends(p) == ends(d) == [("DONE", "")]
    assert d.told[0].bytes == 14


def test_a_second_handoff_needs_no_program_and_no_introduction() -> None:
    world, p, d = p_and_d()
    for name in ("one", "two"):
        world.ready(p, name)
        actions = world.request(d, name)
        world.settle(d, world.find(name).number)
    assert kinds(actions) == ["SendExecute"]
    assert ends(d) == [("DONE", "")] * 2


def test_an_execute_carries_blocks_tokens_sources_and_a_grant_inside_the_lease() -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=5.0)
    (execute,) = of_kind(act.SendExecute, world.request(d, held=16))
    assert dict(execute.src_blocks)["kv"] == world.find().publication.blocks["kv"]
    assert (execute.first_token, execute.stop_token) == (16, 40)
    assert execute.sources == (act.SourceRun(0, p.agents[0].agent_name, 0, 0),)
    assert 4500 < execute.grant_ms < 5000


def test_chunks_continue_each_other_and_may_be_repeated() -> None:
    world, p, d = p_and_d()
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    world.publish(p, blocks={"kv": [3]}, first=2, final=False)
    world.ready(p, blocks={"state": [9]})
    (execute,) = of_kind(act.SendExecute, world.request(d))
    assert [len(ids) for _, ids in execute.src_blocks] == [12, 4]


@pytest.mark.parametrize(("first", "ids"), [(3, [4]), (1, [7]), (-1, [1]), (0, [1, 3])])
def test_a_chunk_that_does_not_continue_the_others_is_refused(first: int, ids: list[int]) -> None:
    world, p = alone("p")
    world.publish(p, blocks={"kv": [1, 2]}, final=False)
    with pytest.raises(HandoffConflictError, match="group kv"):
        world.publish(p, blocks={"kv": ids}, first=first, final=False)
    assert len(world.find().publication.blocks["kv"]) == 8


def test_repeated_words_change_nothing() -> None:
    world, p, d = p_and_d()
    for _ in range(3):
        assert world.publish(p) == []
        assert world.fence(p) == []
    assert kinds(world.request(d))[-1] == "SendExecute"
    for again in (world.request(d, repeated=True, number=1), world.publish(p), world.fence(p)):
        assert again == []
    number = world.find().number
    assert kinds(world.settle(d, number)) == ["TellEnded", "TellEnded"]
    assert world.settle(d, number) == world.fence(p) == []
    # Each is told once more, and only to the one who says again what it said on another stream.
    again = world.request(d, repeated=True) + world.publish(p, repeated=True)
    assert [one.engine for one in again if isinstance(one, act.TellEnded)] == [D, P]
    assert ends(p) == ends(d) == [("DONE", "")] * 2


def test_an_id_that_has_ended_names_no_other_state() -> None:
    world, p, d, number = reading()
    world.settle(d, number)
    for word, side in ((world.publish, p), (world.request, d)):
        with pytest.raises(HandoffConflictError, match=r"has ended DONE.*use a new id"):
            word(side)
    with pytest.raises(HandoffConflictError, match="use a new id"):
        world.request(d, blocks={"kv": [21, 22, 23], "state": [24]}, repeated=True)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_who_never_had_a_part_hears_how_it_ended() -> None:
    world, p, d = p_and_d()
    world.publish(p)
    world.cancel(p)
    world.request(d)
    assert ends(p) == ends(d) == [("CANCELLED", "CANCELLED")]


def test_a_final_publication_is_not_taken_back() -> None:
    world, p = alone("p")
    world.publish(p)
    with pytest.raises(HandoffConflictError, match="position 40"):
        world.publish(p, position=41)
    with pytest.raises(HandoffConflictError):
        world.publish(p, blocks={"kv": [8]}, first=3)
    assert world.publish(p, blocks={"kv": [1, 2]}, final=False) == []


def test_each_side_belongs_to_the_first_that_took_it() -> None:
    world, p, d, other = p_d_and_e()
    world.publish(p)
    world.request(d)
    for words in (world.publish, world.fence, world.request):
        with pytest.raises(HandoffOwnedError):
            words(other)
    with pytest.raises(HandoffUnknownError):
        world.cancel(other)
    with pytest.raises(HandoffUnknownError):
        world.renew(other)
    assert other.told == []
    assert other.record.handoffs == set()


def test_strangers_and_a_new_life_of_an_engine_do_not_own_what_the_old_one_had() -> None:
    world, _, d, number = reading()
    world.settle(d, number)
    again, other = world.engine("d"), world.engine("other")
    for word, side in ((world.request, again), (world.request, other), (world.publish, other)):
        with pytest.raises(HandoffOwnedError, match="incarnation"):
            word(side)
    assert again.told == other.told == []


def test_a_demand_with_other_blocks_is_a_conflict() -> None:
    world, d = alone("d")
    world.request(d)
    with pytest.raises(HandoffConflictError):
        world.request(d, blocks={"kv": [11, 12, 15], "state": [14]}, repeated=True)
    with pytest.raises(HandoffConflictError):
        world.request(d, held=16, repeated=True)
    with pytest.raises(HandoffConflictError, match="already"):
        world.request(d)
    assert world.request(d, repeated=True) == []


def test_only_p_renews() -> None:
    world, p, d = p_and_d()
    world.request(d)
    with pytest.raises(HandoffOwnedError):
        world.renew(d)
    assert world.find().source is None
    world.publish(p)
    world.renew(p, lease_s=60)
    assert world.find().lease.until_s == world.now_s + 60


def test_a_full_directory_refuses_and_takes_again() -> None:
    world, p, d = p_and_d(limits=Limits(max_live=2))
    world.publish(p, "one")
    world.publish(p, "two")
    for words in (world.publish, world.request):
        with pytest.raises(DirectoryFullError):
            words(p, "three")
    world.request(d, "two")
    world.cancel(p, "one")
    assert world.publish(p, "three") == []


def test_history_is_bounded_and_an_end_is_forgotten_in_order() -> None:
    world, p = alone("p", limits=Limits(max_ended=3))
    for index in range(5):
        world.publish(p, f"h{index}")
        world.cancel(p, f"h{index}")
    assert [one.handoff_id for one in world.directory.ledger.ended.values()] == ["h2", "h3", "h4"]
    assert world.directory.ledger.statistics.by_state[State.CANCELLED] == 5


def test_two_models_fail_at_once_for_both() -> None:
    world = World()
    world.outcome = PairRefused(ModelMismatchError("model a is not model b"))
    p, d = world.engine("p"), world.engine("d", 2)
    world.request(d)
    world.publish(p)
    assert ends(p) == ends(d) == [("FAILED", "MODEL_MISMATCH")]
    world.publish(p, "next")
    world.request(d, "next")
    assert len(world.orders(act.MakePlan)) == 1


def test_all_handoffs_of_a_pair_wait_for_one_plan() -> None:
    world = World()
    world.plans_at_once = False
    p, d = world.engine("p"), world.engine("d")
    for name in ("one", "two", "three"):
        world.ready(p, name)
        assert "SendExecute" not in kinds(world.request(d, name))
    world.cancel(d, "two")
    assert len(world.asked_plans) == 1
    assert kinds(world.plan()).count("SendExecute") == 2


def test_what_has_ended_is_not_released_again() -> None:
    world, p, d, number = reading(2, 2)
    world.settle_all(d, number)
    assert world.release(world.find()) == []
    assert ends(p) == ends(d) == [("DONE", "")]


def test_who_cancels_what_has_ended_is_told_once() -> None:
    world, p, d = p_and_d()
    world.publish(p)
    world.cancel(p)
    assert kinds(world.cancel(p)) == ["TellEnded"]
    world.request(d, "asked")
    world.cancel(d, "asked")
    assert kinds(world.cancel(d, "asked")) == ["TellEnded"]


def test_an_end_names_the_other_sides_messages_and_how_long_it_took() -> None:
    world, p, d = p_and_d()
    world.ready(p, sampled_token=5)
    world.request(d)
    world.wait(2.0)
    world.settle(d, world.find().number)
    for side, other, numbers, agents, sampled in (
        (p, d, (1,), d.record.fingerprint(), 5),
        (d, p, (7,), b"", None),
    ):
        (told,) = side.told
        assert (told.transfer_us, told.sampled) == (2_000_000, sampled)
        who = other.record.key.engine_id, other.record.incarnation
        assert told.counterparts == (Counterpart(*who, numbers, agents),)


def test_an_end_before_a_grant_names_no_time_and_only_who_spoke() -> None:
    world, p, d = p_and_d()
    world.request(d, "asked")
    world.cancel(d, "asked")
    world.publish(p, "published", number=0)
    world.request(d, "published")
    world.cancel(p, "published")
    asked, of_d = d.told
    (of_p,) = p.told
    assert [told.transfer_us for told in (asked, of_d, of_p)] == [0, 0, 0]
    assert asked.counterparts == of_d.counterparts == (), "P sent no message that has a number"
    who = d.record.key.engine_id, d.record.incarnation
    assert of_p.counterparts == (Counterpart(*who, (2,), b""),)


def test_p_hears_only_of_readers_whose_reads_ended_as_its_publication_did() -> None:
    world, p, d, e = p_d_and_e()
    f = world.engine("f")
    world.ready(p, readers=2)
    for side, reason in ((d, ""), (e, "READ_FAILED"), (f, "")):
        world.request(side)
        (number,) = (n for n, part in world.directory.ledger.by_number.items() if part.granted)
        world.settle(side, number, reason=reason)
    (told,) = p.told
    assert (told.state, told.delivered) == (State.DONE, 2)
    assert told.transfer_us == 0, "several reads have no common duration"
    assert told.counterparts == tuple(
        Counterpart(side.record.key.engine_id, side.record.incarnation, (1,), agents)
        for side, agents in ((d, d.record.fingerprint()), (f, f.record.fingerprint()))
    )


def test_ends_and_failures_are_listed_for_whoever_asks() -> None:
    world, p, d = p_and_d()
    ledger = world.directory.ledger
    ledger.fresh_ends, ledger.fresh_failures = [], []
    world.settle(d, world.begin(p, d, "done"))
    world.settle(d, world.begin(p, d, "failed"), reason="READ_FAILED")
    world.request(d, "cancelled")
    world.cancel(d, "cancelled")
    world.ready(p, "refused")
    world.request(d, "refused", position=1)
    assert [handoff.handoff_id for handoff in ledger.fresh_ends] == ["done", "failed", "cancelled"]
    failures = [(handoff.handoff_id, failure.reason) for handoff, failure in ledger.fresh_failures]
    assert failures == [("failed", "READ_FAILED"), ("refused", "POSITION_MISMATCH")]


@pytest.mark.parametrize(("held", "position"), [(16, 40), (0, 20)])
def test_a_demand_that_differs_from_the_one_that_ended_is_another(held: int, position: int) -> None:
    world, p, d = p_and_d()
    world.ready(p)
    world.request(d, position=40)
    world.settle(d, world.find().number)
    world.request(d, position=40, number=1, repeated=True)
    assert ends(d) == [("DONE", "")] * 2, "the same demand is told its end again"
    with pytest.raises(HandoffConflictError):
        world.request(d, held=held, position=position, number=1, repeated=True)
