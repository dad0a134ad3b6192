"""Since when members and pools are there, as a broker tells operators: by its own clock."""

from __future__ import annotations

from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Claimed, Joined, Seen
from restow.broker.server.fleet.sightings import Sightings

from restow.broker.layout.values import ModelIdentity, Pool

M, N = Pool("a", ModelIdentity("m")), Pool("a", ModelIdentity("n"))


def test_what_was_there_at_the_first_look_has_no_time() -> None:
    seen = Sightings("us")
    seen.see(Seen(5, frozenset({"x"}), {M: Claim("x", 1, 4)}), 10.0)
    assert (seen.member("x"), seen.claim(M, 4)) == (None, None)
    seen.see(Changed(6, {"y": True}, {N: Claim("y", 2, 6)}), 11.0)
    assert (seen.member("y"), seen.claim(N, 6)) == (11.0, 11.0)
    seen.see(Seen(9, frozenset({"x", "y", "z"}), {M: Claim("x", 1, 4)}), 12.0)
    assert [seen.member(one) for one in "xyz"] == [None, 11.0, 12.0]
    assert seen.claim(N, 6) is None


def test_another_epoch_of_a_pool_begins_anew_and_an_older_one_tells_nothing() -> None:
    seen = Sightings("us")
    seen.see(Seen(5, frozenset(), {M: Claim("x", 1, 4)}), 10.0)
    seen.see(Changed(7, {}, {M: None}), 11.0)
    seen.see(Changed(8, {}, {M: Claim("y", 2, 8)}), 12.0)
    seen.see(Claimed(M, Claim("x", 1, 4), 1), 13.0)
    assert (seen.claim(M, 8), seen.claim(M, 4)) == (12.0, None)


def test_a_member_that_comes_back_is_there_since_then_and_we_since_we_were_let_in() -> None:
    seen = Sightings("us")
    seen.see(Joined(1, 2.0, 0.0), 1.0)
    seen.see(Claimed(M, Claim("us", 1, 3), 1), 2.0)
    seen.see(Seen(2, frozenset({"us", "x"}), {}), 3.0)
    assert (seen.member("us"), seen.claim(M, 3)) == (1.0, 2.0)
    seen.see(Changed(4, {"x": False}, {}), 4.0)
    seen.see(Changed(5, {"x": True}, {}), 5.0)
    assert seen.member("x") == 5.0
