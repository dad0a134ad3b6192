"""Who ends the life of a member that says nothing, when, and what becomes of its claims.

Times are told: no test waits for a lease to end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from etcd.scene import POOLS
from kubernetes_harness.server import ApiServer, api_of
from kubernetes_leases.scene import FLEET
from restow.broker.kubernetes.api import LeasesApi
from restow.broker.kubernetes.leases import member_name, pool_name, pool_object
from restow.broker.kubernetes.registry import KubernetesRegistry
from restow.broker.kubernetes.view import LeasesView
from restow.broker.owners.registry import LeaseEndedError
from restow.broker.owners.timing import Lease
from restow.broker.registry.kubernetes_access import KubernetesError, KubernetesUnreachableError

X, Y = "x.example:7350", "y.example:7350"
POOL = POOLS[0]
LENGTH_S, MARGIN_S = 4.0, 1.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Watching:
    """A registry of a member that is well, with its clock."""

    def __init__(self, api: LeasesApi) -> None:
        self._api = api
        self.clock = Clock()
        self.registry = KubernetesRegistry(api, FLEET, self.clock)

    async def view(self) -> LeasesView:
        """What a watch would know that was up to date at this moment."""
        return LeasesView(await self._api.all(self.registry._selector))

    async def look(self, view: LeasesView, for_s: float = 0.0) -> None:
        """Look for silent ones, for so long, while the API answers but tells nothing of them."""
        until_s = self.clock.now_s + for_s
        while True:
            await self.registry.all()
            await self.registry._end_the_silent(view)
            if self.clock.now_s >= until_s:
                return
            self.clock.now_s = min(self.clock.now_s + 0.5, until_s)


@pytest_asyncio.fixture
async def here(server: ApiServer) -> AsyncIterator[Watching]:
    async with api_of(server) as api:
        yield Watching(api)


@pytest.fixture
def there(api: LeasesApi) -> KubernetesRegistry:
    """Of a member that may be silent."""
    return KubernetesRegistry(api, FLEET, Clock())


async def test_a_silent_member_is_ended_after_its_length_and_its_claims_with_it(
    here: Watching, there: KubernetesRegistry
) -> None:
    entry = await there.join(X, LENGTH_S)
    claim = await there.claim(POOL, X, entry.lease)
    view = await here.view()
    await here.look(view, LENGTH_S - 0.01)
    assert (await here.registry.all()).claims == {POOL: claim}
    await here.look(view, 0.02)
    seen = await here.registry.all()
    assert (seen.members, seen.claims) == (frozenset(), {})
    with pytest.raises(LeaseEndedError):
        await there.keep_alive(entry.lease)


async def test_who_was_heard_by_the_api_lives_on_however_late_the_watch_is(
    here: Watching, there: KubernetesRegistry
) -> None:
    entry = await there.join(X, LENGTH_S)
    old = await here.view()
    await here.look(old)
    await there.keep_alive(entry.lease)
    await here.look(old, 3 * LENGTH_S)
    assert await there.keep_alive(entry.lease) == LENGTH_S


async def test_nobody_is_silent_while_the_api_is(here: Watching, there: KubernetesRegistry) -> None:
    """Else the first one that reaches it again would end all others."""
    entry = await there.join(X, LENGTH_S)
    view = await here.view()
    await here.look(view)
    here.clock.now_s += 10 * LENGTH_S
    await here.registry._end_the_silent(view)
    await here.look(view, LENGTH_S - 0.01)
    assert await there.keep_alive(entry.lease) == LENGTH_S


async def test_one_is_ended_only_when_it_has_stopped_by_its_own_clock(
    here: Watching, there: KubernetesRegistry
) -> None:
    """Its last answered word was sent before it was written, and seen after."""
    sent_s = here.clock.now_s
    entry = await there.join(X, LENGTH_S)
    lease = Lease(entry.lease, entry.length_s, sent_s)
    view = await here.view()
    while lease.may_act(here.clock.now_s, MARGIN_S):
        await here.look(view)
        assert (await here.registry.all()).members == {X}
        here.clock.now_s += 0.1


async def test_who_was_ended_does_not_come_back_in_anothers_life(
    api: LeasesApi, there: KubernetesRegistry, server: ApiServer
) -> None:
    """A write to a name that is free again would make a Lease, if it named no uid."""
    entry = await there.join(X, LENGTH_S)
    server.leases.delete(member_name(FLEET, X), {})
    other = KubernetesRegistry(api, FLEET, Clock())
    again = await other.join(X, LENGTH_S)
    with pytest.raises(LeaseEndedError):
        await there.keep_alive(entry.lease)
    with pytest.raises(LeaseEndedError):
        await there.keep_alive(entry.lease)
    assert await other.keep_alive(again.lease) == LENGTH_S
    await there.revoke(entry.lease)
    assert await other.keep_alive(again.lease) == LENGTH_S


async def test_who_was_ended_and_is_nobody_now_makes_no_lease(
    there: KubernetesRegistry, server: ApiServer
) -> None:
    entry = await there.join(X, LENGTH_S)
    server.leases.delete(member_name(FLEET, X), {})
    with pytest.raises(LeaseEndedError):
        await there.keep_alive(entry.lease)
    assert (await there.all()).members == frozenset()


async def test_a_claim_that_comes_after_its_life_is_void(
    api: LeasesApi, there: KubernetesRegistry, server: ApiServer
) -> None:
    entry = await there.join(X, LENGTH_S)
    life = server.leases.get(member_name(FLEET, X))["metadata"]["uid"]
    server.leases.delete(member_name(FLEET, X), {})
    late = server.leases.create(pool_object(FLEET, POOL, X, life))
    assert (await there.all()).claims == {}
    other = KubernetesRegistry(api, FLEET, Clock())
    mine = await other.join(Y, LENGTH_S)
    claim = await other.claim(POOL, Y, mine.lease)
    assert (claim.address, claim.lease) == (Y, mine.lease)
    assert claim.epoch > int(late["metadata"]["resourceVersion"])
    assert entry.lease != mine.lease


async def test_a_claim_of_an_earlier_life_at_an_address_is_void_though_another_is_there(
    api: LeasesApi, there: KubernetesRegistry, server: ApiServer
) -> None:
    entry = await there.join(X, LENGTH_S)
    first = await there.claim(POOL, X, entry.lease)
    server.leases.delete(member_name(FLEET, X), {})
    again, other = (KubernetesRegistry(api, FLEET, Clock()) for _ in range(2))
    await again.join(X, LENGTH_S)
    assert (await other.all()).claims == {}
    mine = await other.join(Y, LENGTH_S)
    claim = await other.claim(POOL, Y, mine.lease)
    assert (claim.address, claim.epoch > first.epoch) == (Y, True)


async def test_void_claims_that_nobody_wants_are_swept(here: Watching, server: ApiServer) -> None:
    server.leases.create(pool_object(FLEET, POOL, X, "a-life-that-has-ended"))
    async with contextlib.aclosing(here.registry.watch()) as watch:
        seen = await anext(watch)
        assert (seen.members, dict(seen.claims)) == (frozenset(), {})
        await here.registry.join(Y, LENGTH_S)
        assert (await anext(watch)).members == {Y: True}
    names = [one["metadata"]["name"] for one in server.leases.listed({})["items"]]
    assert pool_name(FLEET, POOL) not in names


async def test_an_answer_that_is_lost_does_no_harm(
    there: KubernetesRegistry, server: ApiServer
) -> None:
    entry = await there.join(X, LENGTH_S)
    server.lost.add("POST")
    with pytest.raises(KubernetesUnreachableError):
        await there.claim(POOL, X, entry.lease)
    made = server.leases.get(pool_name(FLEET, POOL))
    claim = await there.claim(POOL, X, entry.lease)
    assert claim.epoch == int(made["metadata"]["resourceVersion"])
    server.lost.add("PUT")
    with contextlib.suppress(KubernetesUnreachableError):
        await there.keep_alive(entry.lease)
    assert await there.keep_alive(entry.lease) == LENGTH_S
    server.lost.add("DELETE")
    with contextlib.suppress(KubernetesUnreachableError):
        await there.release(POOL, claim.epoch)
    await there.release(POOL, claim.epoch)
    assert (await there.all()).claims == {}


async def test_a_lease_that_somebody_wrote_to_is_another_epoch(
    there: KubernetesRegistry, server: ApiServer
) -> None:
    entry = await there.join(X, LENGTH_S)
    claim = await there.claim(POOL, X, entry.lease)
    found = server.leases.get(pool_name(FLEET, POOL))
    found["metadata"]["annotations"]["note"] = "looked at"
    server.leases.replace(found["metadata"]["name"], found)
    again = await there.claim(POOL, X, entry.lease)
    assert (again.lease, again.epoch > claim.epoch) == (entry.lease, True)
    await there.release(POOL, claim.epoch)
    assert (await there.all()).claims == {POOL: again}
    found = server.leases.get(pool_name(FLEET, POOL))
    del found["metadata"]["annotations"]["restow/life"]
    server.leases.replace(found["metadata"]["name"], found)
    with pytest.raises(KubernetesError, match="not as a broker made it: delete it"):
        await there.claim(POOL, X, entry.lease)


async def test_versions_that_are_no_numbers_are_refused(
    there: KubernetesRegistry, server: ApiServer
) -> None:
    await there.join(X, LENGTH_S)
    found = server.leases._found[member_name(FLEET, X)]
    found["metadata"]["resourceVersion"] = "abc"
    with pytest.raises(KubernetesError, match="is no number"):
        await there.all()
