"""The rules by which a broker leads, as a law over random histories of two brokers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from restow.broker.registry.leadership import Leadership, Want
from restow.broker.registry.registry import Fleet, Leader, Timing

TIMING = Timing(lease_s=2.0, margin_s=0.5, keep_alive_every_s=0.4, give_up_s=1.0)
X, Y = "x:1", "y:1"
BOTH = frozenset({X, Y})


def let_in(address: str = X) -> Leadership:
    made = Leadership(address, TIMING)
    made.kept(0.0, 2.0)
    made.saw(Fleet(None, BOTH))
    return made


def leading(epoch: int = 3) -> Leadership:
    made = let_in()
    made.led(Leader(X, epoch, mine=True))
    return made


def test_it_leads_because_an_answer_said_so_and_not_because_it_saw_it() -> None:
    made = let_in()
    assert made.want(0.1) is Want.LEAD
    made.saw(Fleet(Leader(X, 3, mine=True), BOTH, 3))
    assert not made.may_act(0.1)
    assert (made.leader, made.want(0.1)) == ("", Want.LEAD)
    made.led(Leader(X, 3, mine=True))
    assert made.may_act(0.1)
    assert (made.leader, made.want(0.1)) == (X, Want.NOTHING)


def test_another_life_at_its_address_is_another_broker() -> None:
    made = let_in()
    made.led(Leader(X, 3))
    assert not made.epoch
    assert made.want(0.1) is Want.NOTHING


def test_it_acts_until_the_end_of_its_lease_less_the_margin_and_gives_up_later() -> None:
    made = leading()
    assert made.may_act(1.49)
    assert (made.may_act(1.5), made.still_s(1.5)) == (False, 0.0)
    assert made.want(1.5) is Want.NOTHING
    made.tick(2.99)
    assert made.epoch == 3
    made.kept(1.0, 2.0)
    made.kept(0.5, 2.0)  # an earlier request, answered later
    assert made.may_act(2.49)
    made.tick(4.0)
    assert not made.epoch


def test_a_lease_that_has_ended_and_another_leader_end_its_term() -> None:
    made = leading()
    made.lost()
    ended = [made]
    for fleet in (
        Fleet(Leader(Y, 4), BOTH, 4),
        Fleet(None, BOTH, 3),
        Fleet(Leader(X, 3), BOTH, 3),
    ):
        made = leading()
        made.saw(fleet)
        ended.append(made)
    made = leading()
    made.led(Leader(Y, 4))
    for one in (*ended, made):
        assert not one.may_act(0.1)
        assert not one.epoch


def test_it_raises_its_epoch_above_one_that_somebody_names() -> None:
    made = leading(3)
    made.named(3)
    assert made.want(0.1) is Want.NOTHING
    made.named(7)
    assert made.may_act(0.1)
    assert (made.want(0.1), made.named_epoch) == (Want.RAISE, 7)
    made.led(Leader(X, 8, mine=True))
    assert (made.epoch, made.want(0.1)) == (8, Want.NOTHING)


def test_it_leaves_by_letting_go_and_does_not_lead_again() -> None:
    made = leading()
    made.leave()
    assert made.want(0.1) is Want.RELEASE
    assert not made.may_act(0.1)  # another may lead before the answer comes
    made.released()
    assert (made.epoch, made.want(0.1)) == (0, Want.NOTHING)
    made.led(Leader(X, 4, mine=True))  # an answer to a call of before
    assert (made.epoch, made.want(0.1)) == (0, Want.RELEASE)


WORDS = ("keep", "look", "lead", "lost answer", "wait", "leave", "release", "released")
STEPS = st.lists(st.tuples(st.sampled_from(WORDS), st.booleans()), max_size=60)


@settings(max_examples=3000)
@given(STEPS, st.floats(0.9, 1.1))
def test_two_never_act_at_once_whatever_answers_are_lost(
    steps: list[tuple[str, bool]], pace: float
) -> None:
    # A registry gives each broker a lease by its own clock, which both brokers' clocks nearly
    # follow.
    brokers = {X: Leadership(X, TIMING), Y: Leadership(Y, TIMING)}
    paces = {X: pace, Y: 2.0 - pace}
    ends_s = dict.fromkeys(brokers, -1.0)
    leader: tuple[str, int] | None = None
    now_s, highest = 0.0, 0
    for step, turned in steps:
        at = Y if turned else X
        one, own_s = brokers[at], now_s * paces[at]
        if leader is not None and ends_s[leader[0]] <= now_s:
            leader = None
        match step:
            case "keep" | "lost answer" if one.lease is None or ends_s[at] > now_s:
                ends_s[at] = now_s + TIMING.lease_s
                if step == "keep":
                    one.kept(own_s, TIMING.lease_s)
            case "keep" | "lost answer":
                one.lost()
            case "look":
                there = frozenset(name for name in brokers if ends_s[name] > now_s)
                seen = None if leader is None else Leader(*leader, mine=leader[0] == at)
                one.saw(Fleet(seen, there, highest))
            case "lead" if one.want(own_s) is Want.LEAD and ends_s[at] > now_s:
                if leader is None:
                    highest = max(highest, one.named_epoch) + 1
                    leader = (at, highest)
                one.led(Leader(*leader, mine=leader[0] == at))
            case "leave":
                one.leave()
            case "release" | "released" if one.want(own_s) is Want.RELEASE:
                if leader is not None and leader[0] == at:
                    leader = None
                if step == "released":  # otherwise the answer is lost
                    one.released()
            case "wait":
                now_s += 0.3
        acting = [name for name, it in brokers.items() if it.may_act(now_s * paces[name])]
        assert len(acting) < 2
        assert all(leader is not None and leader[0] == name for name in acting)
        for it in brokers.values():
            it.tick(now_s * paces[it.address])
