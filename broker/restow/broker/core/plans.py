"""The plans of pairs of engines: which are known, which are being made, and their memory."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import NamedTuple

from restow.broker.core.common.actions import Action, MakePlan
from restow.broker.core.common.keys import HostPair, PairKey
from restow.broker.core.common.pair import PairOutcome, PairRefused, pair_bytes
from restow.broker.core.engines.account import Account
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.probing import Probing
from restow.broker.errors import RestowError


class Best(NamedTuple):
    """The best known plan of two engines."""

    own: HostPair | None
    """The engines' own hosts; None if nothing is measured between them."""
    key: PairKey
    """The plan's key; without a plan, the key of the plan to wait for."""
    pair: PairOutcome | None


class Plans:
    """The known plans, the latest used at the end, and the handoffs that wait for other plans."""

    def __init__(self, ledger: Ledger, probing: Probing) -> None:
        """Begin without plans."""
        self.known: OrderedDict[PairKey, PairOutcome] = OrderedDict()
        self.planning: dict[PairKey, set[int]] = {}
        """Plans being made, and the numbers of the handoffs that wait for each."""
        self.rough: OrderedDict[PairKey, tuple[EngineRecord, EngineRecord]] = OrderedDict()
        """Pairs that handed over by a plan of other costs than their own, for `Ahead`."""
        self._again_s: OrderedDict[PairKey, float] = OrderedDict()
        """When pairs in `rough` may be put there again."""
        self._ledger = ledger
        self._max_pairs = ledger.limits.max_pairs
        self._probing = probing

    def best(self, source: EngineRecord, destination: EngineRecord) -> Best:
        """Return the best known plan of two engines.

        No handoff waits for better costs: a plan of other costs serves until a better plan is made.
        """
        own, hosts = self._probing.at_hand(source, destination)
        devices = source.on_device and destination.on_device
        layouts = source.layout_digest, destination.layout_digest
        key = PairKey(source.key.tenant, *layouts, devices, hosts)
        pair = self.known.get(key)
        if pair is None:
            plans = chain(reversed(self.known), self.planning)
            key = next((other for other in plans if other.is_alike(key)), key)
            pair = self.known.get(key)
        return Best(own, key, pair)

    def improve(
        self, best: Best, source: EngineRecord, destination: EngineRecord, now_s: float
    ) -> None:
        """Have a plan improved by which a handoff travels, though its costs are not the pair's own.

        That is tried again after ``probe_again_s``, as a measurement may fail.
        """
        own = best.key._replace(hosts=best.own)
        if now_s < self._again_s.get(own, 0.0):
            return
        self._again_s[own] = now_s + self._ledger.limits.probe_again_s
        self.rough[own] = source, destination
        if len(self._again_s) > self._max_pairs:
            forgotten, _ = self._again_s.popitem(last=False)
            self.rough.pop(forgotten, None)

    def make(
        self, key: PairKey, source: EngineRecord, destination: EngineRecord, ahead: bool = False
    ) -> list[Action]:
        """Request the plan of two engines; ``ahead`` says that no handoff needs it yet."""
        self.planning[key] = set()
        costs = self._probing.costs(key)
        return [MakePlan(key, source.layout, destination.layout, costs, ahead)]

    def made(self, key: PairKey, outcome: PairOutcome, waiting: set[int]) -> None:
        """Store a plan that handoffs wait for, or that was made ahead.

        Raises what `Account.check` raises if handoffs wait and the tenant has no room for it. A
        plan that was made ahead is stored only if there is ample room.
        """
        account = self._ledger.tenants.account(key.tenant)
        if not waiting:
            self._keep_ahead(key, outcome, account)
            return
        self._make_room(key.tenant, account, pair_bytes(outcome))
        account.keep(pair_bytes(outcome))
        self.known[key] = outcome
        if len(self.known) > self._max_pairs:
            own = [known for known in self.known if known.tenant == key.tenant]
            self._forget(own[0] if len(own) > 1 else next(iter(self.known)))

    def _keep_ahead(self, key: PairKey, outcome: PairOutcome, account: Account) -> None:
        size_bytes = pair_bytes(outcome)
        if isinstance(outcome, PairRefused) or not account.has_ample(size_bytes):
            return
        if len(self.known) >= self._max_pairs:
            oldest = next((known for known in self.known if known.tenant == key.tenant), None)
            if oldest is None:
                return
            self._forget(oldest)
        account.keep(size_bytes)
        self.known[key] = outcome

    def _make_room(self, tenant: str, account: Account, size_bytes: int) -> None:
        """Forget the tenant's oldest plans that no read uses, until ``size_bytes`` fit."""
        live = self._ledger.by_number.values()
        used: set[int] | None = None
        for key in [known_key for known_key in self.known if known_key.tenant == tenant]:
            try:
                return account.check(size_bytes)
            except RestowError:
                used = used or {
                    id(handoff.pair.programs) for handoff in live if handoff.pair is not None
                }
            known = self.known[key]
            if isinstance(known, PairRefused) or not used & known.keys:
                self._forget(key)
        return account.check(size_bytes)

    def _forget(self, key: PairKey) -> None:
        self._ledger.tenants.account(key.tenant).let_go(pair_bytes(self.known.pop(key)))
