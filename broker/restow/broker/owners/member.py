"""One broker among several: which pools it owns, claims, hands over, and may grant in.

Laws:
- It owns what an answer to its own claim has said, never what it has seen: that may be old.
- It acts in a pool only before the end of its lease less a margin, counted from when the last
  answered request was sent.
- Before it asks for a pool to be released it has stopped acting in it, for good in this epoch.
- It does not keep clients of a pool that is most likely another one's: some time after the end of
  its lease it lets go of them. It asks for its pools again as soon as its lease turns out to live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from restow.broker.layout.values import Pool
from restow.broker.owners.actions import (
    Action,
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
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import (
    Changed,
    Claimed,
    ClaimFailed,
    Drained,
    Event,
    Idle,
    Joined,
    JoinFailed,
    KeptAlive,
    LeaseGone,
    Leave,
    Released,
    Seen,
    Tick,
    Wanted,
    Withdrawn,
)
from restow.broker.owners.held import Held, Stage
from restow.broker.owners.timing import Lease, Timing
from restow.broker.owners.tries import Tries
from restow.broker.owners.view import View


class Member:
    """Takes events with a time and returns actions; asked each time whether it may act."""

    def __init__(self, address: str, timing: Timing) -> None:
        """Begin outside: the first `Tick` joins."""
        self.address, self._timing = address, timing
        self.view = View()
        self.lease: Lease | None = None
        self.held: dict[Pool, Held] = {}
        self._tries = Tries()
        self._joining = False
        self._join_s = self._keep_alive_s = 0.0
        self._leaving = self._withdrawn = self._left = False
        self._withdraw_s = 0.0

    # -- what the broker asks before it acts ------------------------------------------------------

    def may_end(self, pool: Pool, now_s: float) -> int | None:
        """The epoch in which handoffs of the pool may be ended now; None: not by this member."""
        held = self.held.get(pool)
        if held is None or held.stage is Stage.RELEASING or self.lease is None:
            return None
        return held.epoch if self.lease.may_act(now_s, self._timing.margin_s) else None

    def may_grant(self, pool: Pool, now_s: float) -> int | None:
        """The epoch in which handoffs of the pool may be granted now; None: not by this member."""
        held = self.held.get(pool)
        if held is None or held.stage is not Stage.SERVING:
            return None
        return self.may_end(pool, now_s)

    def where(self, pool: Pool) -> str | None:
        """Who owns a pool or is about to, as far as is known; None: nobody. Often ourselves."""
        claim = self.view.claims.get(pool)
        if pool in self.held:
            return self.address
        if claim is not None and claim.address != self.address:
            return claim.address
        return self.view.chosen(pool, self.address if self._leaving else "")

    # -- events -----------------------------------------------------------------------------------

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take one, and return what is wanted now."""
        match event:
            case Joined(lease) if self._left or not self._joining:
                return [Revoke(lease)]  # it was given up before it came
            case Joined():
                self._joining = False
                self.lease = Lease(event.lease, event.length_s, event.sent_s)
                self._keep_alive_s = now_s + self._timing.keep_alive_every_s
                return self._consider(now_s)
            case JoinFailed():
                self._joining, self._join_s = False, now_s + self._timing.retry_s
                return []
            case KeptAlive():
                self._kept_alive(event)
                return []
            case LeaseGone(lease):
                return self._lease_gone(lease, now_s)
            case Claimed(pool, claim, number):
                return self._claimed(pool, claim, number, now_s)
            case ClaimFailed(pool, number):
                self._claim_failed(pool, number, now_s)
                return []
            case Released(pool, epoch):
                return self._gone(pool, epoch)
            case Withdrawn():
                self._withdrawn = True
                return self._consider(now_s)
            case Seen():
                return self._changed(self.view.see(event), now_s)
            case Changed():
                return self._changed(self.view.change(event), now_s)
            case Wanted(pool):
                self._want(pool)
                return self._consider(now_s)
            case Idle(pool):
                return self._release(pool, now_s) if pool in self.held else []
            case Drained(pool, epoch):
                return self._drained(pool, epoch, now_s)
            case Leave():
                self._leaving = True
                self._tries.clear()
                return self._consider(now_s)
            case Tick():
                return self._tick(now_s)

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self.lease is None:
            if not self._joining and not self._leaving and now_s >= self._join_s:
                self._joining = True
                actions.append(Join())
        elif now_s >= self._keep_alive_s:
            self._keep_alive_s = now_s + self._timing.keep_alive_every_s
            actions.append(KeepAlive(self.lease.number))
        if self._has_given_up(now_s):
            actions += [Lost(pool, one.epoch, None) for pool, one in self.held.items()]
            self.held.clear()
        return actions + self._consider(now_s)

    def _has_given_up(self, now_s: float) -> bool:
        """Whether its pools are most likely another one's, though the lease may yet live."""
        return self.lease is not None and self.lease.is_over(now_s, self._timing.give_up_s)

    def _kept_alive(self, event: KeptAlive) -> None:
        """Answers may come in another order than their requests were sent."""
        lease = self.lease
        if lease is not None and lease.number == event.lease and event.sent_s > lease.sent_s:
            self.lease = replace(lease, length_s=event.length_s, sent_s=event.sent_s)

    def _lease_gone(self, number: int, now_s: float) -> list[Action]:
        if self.lease is None or self.lease.number != number:
            return []
        self.lease, self._join_s = None, now_s
        lost = [Lost(pool, one.epoch, self._successor(pool)) for pool, one in self.held.items()]
        again = [pool for pool, one in self.held.items() if one.stage is Stage.SERVING]
        self.held.clear()
        for pool in again:
            self._want(pool)
        self._tries.break_off()
        return [*lost, *self._tick(now_s)]

    # -- claims -----------------------------------------------------------------------------------

    def _want(self, pool: Pool) -> None:
        if not self._leaving and pool not in self.held:
            self._tries.want(pool)

    def _claimed(self, pool: Pool, claim: Claim, number: int, now_s: float) -> list[Action]:
        """An answer counts for the try that is under way alone: an earlier one's may be old."""
        self.view.learn(pool, claim)
        if not self._tries.is_under_way(pool, number):
            return []
        self._tries.forget(pool)
        if not self._is_ours(claim):
            return []
        self.held[pool] = Held(claim.epoch)
        return [Serve(pool, claim.epoch), *self._consider(now_s)]

    def _claim_failed(self, pool: Pool, number: int, now_s: float) -> None:
        if self._tries.is_under_way(pool, number):
            self._tries.fail(pool, now_s + self._timing.retry_s)

    def _changed(self, gone: Mapping[Pool, Claim], now_s: float) -> list[Action]:
        """Those that have gone, and others that are ours no more."""
        actions: list[Action] = []
        for pool, claim in gone.items():
            held = self.held.get(pool)
            if held is not None:
                actions += self._gone(pool, claim.epoch)
                if held.stage is Stage.SERVING:  # not by us: the lease has ended, most likely
                    self._want(pool)
            elif not self._is_ours(claim) and self.view.chosen(pool) == self.address:
                self._want(pool)
        for pool, held in list(self.held.items()):
            known = self.view.claims.get(pool)
            if known is not None and known.epoch > held.epoch:
                actions += self._gone(pool, held.epoch)
        return actions + self._consider(now_s)

    def _is_ours(self, claim: Claim) -> bool:
        return self.lease is not None and claim.lease == self.lease.number

    # -- what follows from all that is known ------------------------------------------------------

    def _consider(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self._leaving and not self._left:
            actions += self._leave(now_s)
        if self.lease is not None and not self._has_given_up(now_s):
            actions += self._claim_what_is_free(self.lease, now_s)
            for pool in list(self.held):
                actions += self._hand_over(pool, now_s)
        return actions

    def _claim_what_is_free(self, lease: Lease, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self.address not in self.view.members and not self._leaving:
            return actions  # the watch has not told us of ourselves yet, so of whom else?
        for pool, claim in self.view.claims.items():
            # The answer to a claim was lost, and it was taken perhaps long after it was made.
            if self._is_ours(claim) and pool not in self.held and pool not in self._tries:
                if self._successor(pool) is None and not self._leaving:
                    self._tries.want(pool)
                else:
                    self.held[pool] = Held(claim.epoch, Stage.RELEASING)
        for pool in self._tries.due(now_s):
            known = self.view.claims.get(pool)
            free = known is None and self.view.chosen(pool) == self.address
            if free or (known is not None and self._is_ours(known)):
                actions.append(TakePool(pool, lease.number, self._tries.begin(pool)))
            else:
                self._tries.forget(pool)
        return actions

    def _hand_over(self, pool: Pool, now_s: float) -> list[Action]:
        held = self.held[pool]
        to = self._successor(pool)
        match held.stage:
            case Stage.SERVING if self._leaving or to is not None:
                due_s = now_s + self._timing.drain_s
                self.held[pool] = replace(held, stage=Stage.DRAINING, due_s=due_s)
                return [Drain(pool, held.epoch)]
            case Stage.DRAINING | Stage.DRAINED if to is None and not self._leaving:
                self.held[pool] = Held(held.epoch)
                return [Serve(pool, held.epoch)]
            case Stage.DRAINING if now_s >= held.due_s:
                return self._drained(pool, held.epoch, now_s)
            case Stage.DRAINED if self._withdrawn:
                return self._release(pool, now_s)
            case Stage.RELEASING if now_s >= held.due_s:
                return self._release(pool, now_s)
        return []

    def _successor(self, pool: Pool) -> str | None:
        """Another member that is to own it; None: nobody, or we."""
        chosen = self.view.chosen(pool, self.address if self._leaving else "")
        return None if chosen == self.address else chosen

    def _drained(self, pool: Pool, epoch: int, now_s: float) -> list[Action]:
        held = self.held.get(pool)
        if held is None or held.epoch != epoch or held.stage is not Stage.DRAINING:
            return []
        if self._leaving and not self._withdrawn:
            self.held[pool] = replace(held, stage=Stage.DRAINED)
            return []
        return self._release(pool, now_s)

    def _release(self, pool: Pool, now_s: float) -> list[Action]:
        held = self.held[pool]
        due_s = now_s + self._timing.retry_s
        self.held[pool] = replace(held, stage=Stage.RELEASING, due_s=due_s)
        return [ReleasePool(pool, held.epoch)]

    def _gone(self, pool: Pool, epoch: int) -> list[Action]:
        held = self.held.get(pool)
        if held is None or held.epoch > epoch:
            return []
        del self.held[pool]
        self.view.forget(pool, epoch)
        return [Lost(pool, held.epoch, self.where(pool))]

    def _leave(self, now_s: float) -> list[Action]:
        if self.lease is None:
            self._left = True
            return [Left()]
        if not self._withdrawn:
            if now_s < self._withdraw_s:
                return []
            self._withdraw_s = now_s + self._timing.retry_s
            return [Withdraw(self.lease.number)]
        if not self.held:
            self._left = True
            return [Revoke(self.lease.number), Left()]
        return []
