"""One broker among several: what it says when it hears what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import RequestError
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.actions import (
    Drain,
    Join,
    KeepAlive,
    Left,
    Lost,
    ReleasePool,
    Revoke,
    Serve,
    TakePool,
    Withdraw,
)
from restow.broker.owners.claim import Claim, chosen
from restow.broker.owners.events import (
    Changed,
    Claimed,
    ClaimFailed,
    Drained,
    Idle,
    Joined,
    KeptAlive,
    LeaseGone,
    Leave,
    Released,
    Seen,
    Tick,
    Wanted,
    Withdrawn,
)
from restow.broker.owners.member import Member
from restow.broker.owners.timing import Timing

ME, OTHER = "me:1", "other:1"
POOLS = [Pool("a", ModelIdentity(f"m{number}")) for number in range(200)]
MINE = next(pool for pool in POOLS if chosen(pool, [ME, OTHER]) == ME)
THEIRS = next(pool for pool in POOLS if chosen(pool, [ME, OTHER]) == OTHER)
addresses = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


def joined(*members: str) -> Member:
    """With lease 7 from second 0 on, as one of ``members``."""
    member = Member(ME, Timing())
    assert member.on(Tick(), 0.0) == [Join()]
    assert member.on(Tick(), 0.1) == []
    assert member.on(Joined(7, 2.0, 0.0), 0.2) == []
    assert member.on(Seen(5, frozenset(members or (ME,)), {}), 0.2) == []
    return member


def owning(pool: Pool, *members: str) -> Member:
    """The same, in epoch 6."""
    member = joined(*members)
    assert member.on(Wanted(pool), 0.3) == [TakePool(pool, 7, 1)]
    assert member.on(Claimed(pool, Claim(ME, 7, 6), 1), 0.4) == [Serve(pool, 6)]
    return member


def came(revision: int, address: str) -> Changed:
    return Changed(revision, {address: True}, {})


@given(addresses, st.tuples(st.text(), st.text()))
def test_all_find_the_same_owner_and_a_member_takes_only_its_own_along(
    members: list[str], names: tuple[str, str]
) -> None:
    pool = Pool(names[0], ModelIdentity(names[1]))
    owner = chosen(pool, members)
    assert owner == chosen(pool, reversed(members))
    for gone in members:
        left = [one for one in members if one != gone]
        assert chosen(pool, left) == owner or gone == owner


def test_pools_are_shared_out_evenly() -> None:
    members = ["x:7350", "y:7350", "z:7350"]
    pools = [Pool("a", ModelIdentity(f"model-{number}")) for number in range(3000)]
    counts = [sum(chosen(pool, members) == one for pool in pools) for one in members]
    assert min(counts) > 900


def test_it_acts_until_its_lease_less_the_margin_is_over() -> None:
    member = owning(MINE)
    assert member.may_grant(MINE, 1.49) == 6
    assert member.may_grant(MINE, 1.5) is None
    assert member.may_end(MINE, 1.5) is None
    member.on(KeptAlive(7, 2.0, 1.0), 1.6)
    assert member.may_grant(MINE, 2.49) == 6
    member.on(KeptAlive(7, 2.0, 0.5), 1.7)  # of an earlier request, and later here
    assert member.may_grant(MINE, 2.49) == 6
    assert member.may_grant(MINE, 2.5) is None


def test_a_lease_that_was_thought_over_and_is_not_goes_on_in_its_epoch() -> None:
    member = owning(MINE)
    assert member.may_grant(MINE, 9.0) is None
    assert member.on(KeptAlive(7, 2.0, 8.9), 9.1) == []
    assert member.may_grant(MINE, 9.1) == 6


def test_one_that_hears_nothing_of_its_lease_lets_its_clients_go_and_takes_the_pool_up_again() -> (
    None
):
    member = owning(MINE)
    assert member.on(Tick(), 2.9) == [KeepAlive(7)]
    assert member.on(Tick(), 3.0) == [Lost(MINE, 6, None)]
    assert member.on(Wanted(MINE), 3.1) == []
    assert member.on(Tick(), 9.0) == [KeepAlive(7)]
    assert member.may_end(MINE, 9.0) is None
    # The lease lives after all: nobody else can have claimed what stands under it.
    assert member.on(KeptAlive(7, 2.0, 9.0), 9.1) == []
    assert member.on(Tick(), 9.15) == [TakePool(MINE, 7, 2)]
    assert member.on(Claimed(MINE, Claim(ME, 7, 6), 2), 9.2) == [Serve(MINE, 6)]
    assert member.may_grant(MINE, 9.2) == 6


def test_it_keeps_alive_as_often_as_it_is_told_to() -> None:
    member = joined()
    assert member.on(Tick(), 0.5) == []
    assert member.on(Tick(), 0.61) == [KeepAlive(7)]
    assert member.on(Tick(), 1.0) == []
    assert member.on(Tick(), 1.02) == [KeepAlive(7)]


def test_a_lease_that_has_ended_takes_its_pools_along_and_it_joins_again() -> None:
    member = owning(MINE)
    assert member.on(LeaseGone(6), 3.0) == []
    assert member.on(LeaseGone(7), 3.0) == [Lost(MINE, 6, None), Join()]
    assert member.may_end(MINE, 3.0) is None
    assert member.on(LeaseGone(7), 3.1) == []
    assert member.on(Joined(8, 2.0, 3.0), 3.2) == []
    # When the old key is gone, the pool is claimed anew.
    member.on(Changed(6, {}, {MINE: Claim(ME, 7, 6)}), 3.25)
    assert member.on(Changed(9, {}, {MINE: None}), 3.3) == [TakePool(MINE, 8, 2)]


def test_a_member_that_hears_of_its_own_end_first_claims_its_pools_when_it_is_back() -> None:
    member = owning(MINE)
    assert member.on(Changed(9, {ME: False}, {MINE: None}), 3.0) == [Lost(MINE, 6, None)]
    assert member.on(LeaseGone(7), 3.1) == [Join()]
    assert member.on(Joined(8, 2.0, 3.1), 3.2) == []
    assert member.on(Changed(10, {ME: True}, {}), 3.3) == [TakePool(MINE, 8, 2)]


def test_what_the_watch_says_is_no_claim_of_ours() -> None:
    member = joined()
    actions = member.on(Changed(6, {}, {MINE: Claim(ME, 7, 6)}), 0.3)
    assert member.may_end(MINE, 0.3) is None
    assert actions == [TakePool(MINE, 7, 1)]  # its answer may have been lost: ask whose it is
    assert member.on(Claimed(MINE, Claim(ME, 7, 6), 1), 0.4) == [Serve(MINE, 6)]


def test_an_answer_counts_for_its_own_try_alone() -> None:
    member = joined()
    assert member.on(Wanted(MINE), 0.3) == [TakePool(MINE, 7, 1)]
    assert member.on(ClaimFailed(MINE, 1), 0.4) == []
    assert member.on(Tick(), 0.5) == []
    assert TakePool(MINE, 7, 2) in member.on(Tick(), 0.8)
    assert member.on(Claimed(MINE, Claim(ME, 7, 6), 1), 0.9) == []
    assert member.may_end(MINE, 0.9) is None
    assert member.on(Claimed(MINE, Claim(ME, 7, 6), 2), 1.0) == [Serve(MINE, 6)]


def test_it_sends_to_who_owns_a_pool_and_else_to_who_shall() -> None:
    member = joined(ME, OTHER)
    assert (member.where(MINE), member.where(THEIRS)) == (ME, OTHER)
    assert member.on(Wanted(THEIRS), 0.3) == []
    member.on(Changed(6, {}, {MINE: Claim(OTHER, 9, 6)}), 0.4)
    assert member.where(MINE) == OTHER
    assert member.on(Wanted(MINE), 0.5) == []
    assert Member(ME, Timing()).where(MINE) is None


def test_a_claim_that_another_was_faster_with_is_his() -> None:
    member = joined(ME, OTHER)
    member.on(Wanted(MINE), 0.3)
    assert member.on(Claimed(MINE, Claim(OTHER, 9, 6), 1), 0.4) == []
    assert member.where(MINE) == OTHER
    assert member.on(Tick(), 0.5) == []


def test_one_that_joins_is_handed_its_share_when_nothing_is_under_way() -> None:
    member = owning(THEIRS)
    assert member.on(came(8, OTHER), 0.5) == [Drain(THEIRS, 6)]
    assert (member.may_grant(THEIRS, 0.5), member.may_end(THEIRS, 0.5)) == (None, 6)
    assert member.on(Drained(THEIRS, 5), 0.6) == []
    assert member.on(Drained(THEIRS, 6), 0.6) == [ReleasePool(THEIRS, 6)]
    assert member.may_end(THEIRS, 0.6) is None
    assert member.on(Released(THEIRS, 6), 0.7) == [Lost(THEIRS, 6, OTHER)]
    assert member.on(Released(THEIRS, 6), 0.7) == []
    assert member.on(Changed(9, {}, {THEIRS: None}), 0.8) == []


def test_what_is_under_way_holds_it_up_for_a_while_and_a_release_is_asked_for_again() -> None:
    member = owning(THEIRS)
    member.on(KeptAlive(7, 60.0, 0.4), 0.4)
    member.on(came(8, OTHER), 0.5)
    assert ReleasePool(THEIRS, 6) not in member.on(Tick(), 1.4)
    assert ReleasePool(THEIRS, 6) in member.on(Tick(), 1.5)
    assert ReleasePool(THEIRS, 6) not in member.on(Tick(), 1.7)
    assert ReleasePool(THEIRS, 6) in member.on(Tick(), 1.81)


def test_one_that_goes_before_it_was_handed_anything_gets_nothing() -> None:
    member = owning(THEIRS)
    member.on(came(8, OTHER), 0.5)
    assert member.on(Changed(9, {OTHER: False}, {}), 0.6) == [Serve(THEIRS, 6)]
    assert member.may_grant(THEIRS, 0.6) == 6
    assert member.on(Drained(THEIRS, 6), 0.7) == []


def test_pools_of_one_that_died_are_claimed_by_who_is_chosen_at_once() -> None:
    member = joined(ME, OTHER)
    member.on(Changed(6, {}, {MINE: Claim(OTHER, 9, 6), THEIRS: Claim(OTHER, 9, 6)}), 0.3)
    died = Changed(8, {OTHER: False}, {MINE: None, THEIRS: None})
    assert set(member.on(died, 0.4)) == {TakePool(MINE, 7, 1), TakePool(THEIRS, 7, 2)}


def test_an_old_change_changes_nothing() -> None:
    member = owning(MINE, ME, OTHER)
    member.on(KeptAlive(7, 2.0, 0.4), 0.4)
    assert member.on(Changed(5, {OTHER: False}, {MINE: None}), 0.5) == []
    assert member.on(Seen(4, frozenset({OTHER}), {}), 0.5) == []
    assert member.may_grant(MINE, 0.5) == 6
    # Its own claim is of revision 6: what went before was another one.
    assert member.on(Changed(6, {}, {MINE: None}), 0.6) == []
    assert member.may_grant(MINE, 0.6) == 6


def test_an_old_answer_says_nothing_of_a_pool_that_was_seen_to_go() -> None:
    member = joined(ME, OTHER)
    assert member.on(Wanted(MINE), 0.3) == [TakePool(MINE, 7, 1)]
    member.on(Changed(6, {}, {MINE: Claim(OTHER, 9, 6)}), 0.4)
    member.on(Changed(7, {}, {MINE: None}), 0.4)
    assert member.on(Claimed(MINE, Claim(OTHER, 9, 6), 1), 0.5) == []
    assert member.where(MINE) == ME
    assert member.on(Wanted(MINE), 0.6) == [TakePool(MINE, 7, 2)]


def test_one_that_has_not_seen_itself_decides_nothing_yet() -> None:
    member = Member(ME, Timing())
    member.on(Tick(), 0.0)
    member.on(Joined(7, 2.0, 0.0), 0.2)
    assert member.on(Wanted(MINE), 0.3) == []
    assert member.on(Seen(5, frozenset({ME}), {}), 0.4) == [TakePool(MINE, 7, 1)]


def test_what_an_answer_told_stands_against_older_changes() -> None:
    member = joined(ME, OTHER)
    member.on(Wanted(MINE), 0.3)
    assert member.on(Claimed(MINE, Claim(OTHER, 9, 8), 1), 0.4) == []
    for change in (Claim(ME, 3, 6), None):
        member.on(Changed(7 - (change is not None), {}, {MINE: change}), 0.5)
        assert member.where(MINE) == OTHER


def test_a_pool_that_is_gone_or_anothers_is_lost() -> None:
    for changed, to in (
        (Changed(8, {}, {MINE: None}), ME),
        (Changed(8, {}, {MINE: Claim(OTHER, 9, 8)}), OTHER),
    ):
        member = owning(MINE, ME, OTHER)
        assert Lost(MINE, 6, to) in member.on(changed, 0.5)
        assert member.may_end(MINE, 0.5) is None


def test_one_that_leaves_is_forgotten_first_and_hands_on_what_it_has() -> None:
    member = owning(MINE, ME, OTHER)
    assert member.on(Leave(), 0.5) == [Withdraw(7), Drain(MINE, 6)]
    assert member.where(THEIRS) == OTHER
    assert member.on(Drained(MINE, 6), 0.6) == []
    assert member.may_end(MINE, 0.6) == 6  # until nobody counts on it
    assert member.on(Withdrawn(), 0.7) == [ReleasePool(MINE, 6)]
    assert member.on(Released(MINE, 6), 0.8) == [Lost(MINE, 6, OTHER)]
    assert member.on(Tick(), 0.85) == [KeepAlive(7), Revoke(7), Left()]
    assert member.on(Wanted(MINE), 0.9) == []


def test_one_that_never_came_in_leaves_at_once_and_leaves_nothing() -> None:
    member = Member(ME, Timing())
    assert member.on(Tick(), 0.0) == [Join()]
    assert member.on(Leave(), 0.1) == [Left()]
    assert member.on(Joined(7, 2.0, 0.0), 0.2) == [Revoke(7)]


def test_a_pool_that_nobody_uses_is_given_back_and_taken_when_it_is_wanted() -> None:
    member = owning(MINE)
    assert member.on(Idle(MINE), 0.5) == [ReleasePool(MINE, 6)]
    assert member.on(Released(MINE, 6), 0.5) == [Lost(MINE, 6, ME)]
    assert member.on(Changed(8, {}, {MINE: None}), 0.5) == []
    assert member.on(Wanted(MINE), 0.5) == [TakePool(MINE, 7, 2)]


def test_a_lease_that_comes_after_it_was_given_up_is_given_back() -> None:
    member = joined()
    assert member.on(Joined(9, 2.0, 0.1), 0.5) == [Revoke(9)]
    assert member.lease is not None
    assert member.lease.number == 7


@pytest.mark.parametrize("times", [{"lease_s": 0.8}, {"margin_s": -1}, {"keep_alive_every_s": 0}])
def test_times_that_can_not_be_kept_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="make the lease longer"):
        Timing(**times)
