"""Members and claims as Lease objects of a Kubernetes, without an etcd of one's own.

Kubernetes ends no Lease by itself, so the members end each other's, and all else is as with etcd:

- A member's life is its Lease's uid. Another member deletes that Lease when it has seen nothing new
  of it for the length that it names, by its own clock, counted from when it *saw* the last word;
  and only that version which it saw last (a precondition of the deletion). So a member that has
  been heard by the API since then lives on, however late the watch is. While the API does not speak
  to those who watch, nobody is silent to them.
- The deleted one had *sent* its last answered word before that was written, so before it was seen:
  by its own clock it stopped a margin before anybody may delete. Both count durations alone, and
  the margin is for clocks that differ in their pace. No word can bring its life back: a write names
  the uid, and another Lease of that name has another one.
- A claim is a Lease that names its member's life, and is void once that has ended, which everybody
  finds by reading the member's Lease (the newest, not what a watch knows). What is void is deleted,
  that version alone, and then claimed anew: of two, one makes the Lease.
- The resourceVersion that made a claim's Lease is its epoch, and as claims are never written, it
  stays. It rises over all Leases, so a pool's next claim has a higher one. If somebody writes to
  such a Lease by hand, that is another epoch, and the owner claims it again.
- An answer that is lost does no harm: a claim or a join that is found made is known by the life, or
  by a word of chance; a write that was made is found by its version, which is another one.

Nobody else may delete these Leases: that would end a life while its member still acts. Agents would
refuse the older epoch, as always.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from restow.broker.kubernetes.api import LeasesApi, Object
from restow.broker.kubernetes.errors import (
    ConflictError,
    ExistsError,
    GoneError,
    KubernetesError,
    KubernetesSettingsError,
    NotThereError,
)
from restow.broker.kubernetes.leases import (
    FLEET,
    MemberLease,
    PoolLease,
    fleet_object,
    member_name,
    member_object,
    number_of,
    pool_name,
    pool_object,
    read,
    renewed,
)
from restow.broker.kubernetes.silence import Silence
from restow.broker.kubernetes.view import LeasesView
from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen
from restow.broker.owners.registry import AddressTakenError, Entry, LeaseEndedError

TRIES = 5
"""So often something is tried that another one changes meanwhile."""
LOOK_EVERY_S = 0.1
"""How often silent members are looked for."""
SWEPT_AT_ONCE = 16


@dataclass(slots=True)
class _Life:
    """One of ours."""

    found: Object
    """Its Lease as we wrote it last."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class KubernetesRegistry:
    """Implements `owners.registry.Registry`."""

    def __init__(self, api: LeasesApi, fleet: str, clock: Callable[[], float]) -> None:
        """Keep the Leases of one fleet. Raises `KubernetesSettingsError` for a name of none.

        ``clock`` goes on while the host sleeps.
        """
        if not fleet[-1:].isalnum() or ".." in fleet or ".-" in fleet or "-." in fleet:
            raise KubernetesSettingsError(
                f"fleet {fleet} can't be part of a Lease's name: end its parts with a letter or a "
                f"digit",
                fleet=fleet,
            )
        self._api, self._fleet, self._clock = api, fleet, clock
        self._selector = f"{FLEET}%3D{fleet}"
        self._lives: dict[int, _Life] = {}
        self._silence = Silence()
        api.answered = lambda: self._silence.answered(self._clock())

    async def join(self, address: str, length_s: float) -> Entry:
        """Make the member's Lease. Raises `AddressTakenError`, `KubernetesError`."""
        fleet = await self._fleet_uid()
        nonce, whole_s = uuid.uuid4().hex, max(1, math.ceil(length_s))
        try:
            found = await self._api.create(member_object(self._fleet, address, whole_s, nonce))
        except ExistsError:
            found = await self._api.get(member_name(self._fleet, address))
        made = read(found)
        if not isinstance(made, MemberLease) or made.nonce != nonce:
            raise AddressTakenError(
                f"another broker advertises {address}, or did a moment ago: give each its own "
                f"--advertise; one that was killed is gone when its lease ends",
                address=address,
            )
        self._lives[made.number] = _Life(found)
        return Entry(made.number, float(whole_s), f"{fleet}/{self._fleet}")

    async def keep_alive(self, lease: int) -> float:
        """Have a lease begin anew, and return its length in seconds."""
        return float((await self._write(lease))["spec"]["leaseDurationSeconds"])

    async def claim(self, pool: Pool, address: str, lease: int) -> Claim:
        """Make the pool's Lease if there is none that counts, and return whose it is now."""
        life = self._life(lease).found["metadata"]["uid"]
        made = pool_object(self._fleet, pool, address, life)
        for _ in range(TRIES):
            try:
                found = await self._api.create(made)
            except ExistsError:
                try:
                    found = await self._api.get(pool_name(self._fleet, pool))
                except NotThereError:
                    continue
            known = read(found)
            if not isinstance(known, PoolLease) or known.pool != pool:
                raise KubernetesError(
                    f"Lease {found['metadata']['name']} is not as a broker made it: delete it"
                )
            if known.life == life or await self._lives_on(known):
                return known.claim
            await self._delete(known)
        raise KubernetesError(f"others change the Lease of the pool of model {pool.model} again")

    async def release(self, pool: Pool, epoch: int) -> None:
        """Delete the pool's Lease if it is of that epoch."""
        with contextlib.suppress(NotThereError, ConflictError):
            await self._api.delete(pool_name(self._fleet, pool), resourceVersion=str(epoch))

    async def withdraw(self, address: str, lease: int) -> None:
        """Mark the member's Lease if it is of that life: it leaves, and still owns its pools."""
        life = self._lives.get(lease)
        if life is not None and life.found["spec"]["holderIdentity"] == address:
            with contextlib.suppress(LeaseEndedError):
                await self._write(lease, leaving=True)

    async def revoke(self, lease: int) -> None:
        """End a life: its claims are void."""
        life = self._lives.get(lease)
        if life is None:
            return
        metadata = life.found["metadata"]
        with contextlib.suppress(NotThereError, ConflictError):
            await self._api.delete(metadata["name"], uid=metadata["uid"])
        self._lives.pop(lease, None)

    async def watch(self) -> AsyncGenerator[Seen | Changed, None]:
        """Yield all there is, and then each change, and end silent lives meanwhile.

        It ends with a `KubernetesError`.
        """
        while True:
            view = LeasesView(await self._api.all(self._selector))
            yield view.seen()
            await self._sweep(view)
            with contextlib.suppress(GoneError):
                while True:
                    changes = self._api.watch(self._selector, view.version, LOOK_EVERY_S)
                    async with contextlib.aclosing(changes):
                        async for event in changes:
                            changed = None if event is None else view.take(event)
                            if changed is not None:
                                yield changed
                            await self._end_the_silent(view)

    async def all(self) -> Seen:
        """All there is now."""
        return LeasesView(await self._api.all(self._selector)).seen()

    # -- lives ------------------------------------------------------------------------------------

    def _life(self, lease: int) -> _Life:
        life = self._lives.get(lease)
        if life is None:
            raise LeaseEndedError("the broker's Lease has ended", lease=lease)
        return life

    async def _write(self, lease: int, leaving: bool = False) -> Object:
        """Write our Lease, unless that life has ended: then raise `LeaseEndedError`."""
        life = self._life(lease)
        async with life.writing:
            for _ in range(TRIES):
                try:
                    life.found = await self._api.replace(renewed(life.found, leaving))
                except (ConflictError, NotThereError):
                    # Ended; or an answer of ours was lost, or somebody else wrote to it.
                    await self._read_again(life, lease)
                else:
                    return life.found
        raise KubernetesError("others write to the broker's Lease again and again")

    async def _read_again(self, life: _Life, lease: int) -> None:
        metadata = life.found["metadata"]
        try:
            found = await self._api.get(metadata["name"])
        except NotThereError:
            found = {}
        if (found.get("metadata") or {}).get("uid") != metadata["uid"]:
            self._lives.pop(lease, None)
            raise LeaseEndedError("the broker's Lease has ended", lease=lease)
        life.found = found

    async def _lives_on(self, claimed: PoolLease) -> bool:
        """Whether the life that a claim names is there, by the newest that there is to read."""
        try:
            found = read(await self._api.get(member_name(self._fleet, claimed.address)))
        except NotThereError:
            return False
        return isinstance(found, MemberLease) and found.life == claimed.life

    async def _end_the_silent(self, view: LeasesView) -> None:
        now_s = self._clock()
        self._silence.hear(view.members.values(), now_s)
        for one in self._silence.over(view.members.values(), now_s):
            if number_of(one.life) in self._lives:
                continue
            try:
                await self._api.delete(one.name, uid=one.life, resourceVersion=one.version)
            except (ConflictError, NotThereError):  # as the watch will tell
                self._silence.wait(one, self._clock())
            except KubernetesError:
                return  # try again at the next look

    # -- others' leftovers ------------------------------------------------------------------------

    async def _sweep(self, view: LeasesView) -> None:
        """Delete void claims, which nobody may want any more."""
        void, room = view.void(), asyncio.Semaphore(SWEPT_AT_ONCE)

        async def delete(one: PoolLease) -> None:
            async with room:
                with contextlib.suppress(KubernetesError):
                    await self._delete(one)

        await asyncio.gather(*map(delete, void))

    async def _delete(self, void: PoolLease) -> None:
        with contextlib.suppress(NotThereError, ConflictError):
            await self._api.delete(void.name, resourceVersion=void.version)

    async def _fleet_uid(self) -> str:
        made = fleet_object(self._fleet)
        try:
            found = await self._api.get(made["metadata"]["name"])
        except NotThereError:
            try:
                found = await self._api.create(made)
            except ExistsError:
                found = await self._api.get(made["metadata"]["name"])
        return str(found["metadata"]["uid"])
