"""Prefixes: what engines announce to hold, and who holds how much of a requested chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from restow.broker.core.common.actions import Action, TellHoldings
from restow.broker.core.common.events import Batch, Chain, HashForm, HashRun, Held
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.prefix.changes import Change, ChangeLog, Follower, Kind
from restow.broker.core.prefix.index import HashKeys, Index, Keyer, Scope, Segment
from restow.broker.core.prefix.rules import GroupRule, longest, rules_of, step_of
from restow.broker.errors import ChainFormError, HoldingsError
from restow.broker.layout.values import ModelIdentity


@dataclass(slots=True, eq=False)
class Announcements:
    """The announcements of an engine, from its first batch on a stream until the stream ends."""

    engine: EngineKey
    model: ModelIdentity
    """The model without its revision, because each key depends on a revision of its own."""
    form: HashForm
    rules: tuple[GroupRule, ...]
    slots: dict[str, int]
    """The slot of each group that counts."""
    revision: str = ""
    """The revision of the engine's weights; a store has states of others too."""
    keeps: bool = False
    """Whether the engine is a store."""
    heard: int = 0
    """The number of the last batch received."""
    groups: dict[int, str] = field(init=False)
    """The group of each slot."""

    def __post_init__(self) -> None:
        """Invert ``slots``."""
        self.groups = {slot: group for group, slot in self.slots.items()}


@dataclass(slots=True, eq=False)
class Tellers:
    """Engines of the same tenant, model and hash form, which can use each other's states."""

    by_engine: dict[EngineKey, Announcements] = field(default_factory=dict)
    of_slot: dict[int, Announcements] = field(default_factory=dict)
    step: int = 0
    """The `rules.step_of` of these engines."""


@dataclass(slots=True, eq=False)
class Holders:
    """The holdings of a tenant's engines. Tenants share none."""

    index: Index = field(default_factory=Index)
    tellers: dict[EngineKey, Announcements] = field(default_factory=dict)
    alike: dict[tuple[ModelIdentity, HashForm], Tellers] = field(default_factory=dict)
    gone: deque[int] = field(default_factory=deque)
    """Slots of engines that left: queries ignore them, and `clear` removes them step by step."""
    forgotten: int = 0
    """Number of holdings that were dropped for lack of memory."""
    _slots: int = 0

    @property
    def empty(self) -> bool:
        """Return whether nothing of the tenant is left."""
        return not self.tellers and self.index.empty

    def begin(
        self,
        engine: EngineKey,
        identity: ModelIdentity,
        form: HashForm,
        rules: tuple[GroupRule, ...],
        keeps: bool = False,
    ) -> Announcements:
        """Begin the announcements of an engine that has none; a store ``keeps`` states."""
        model, slots = identity.of_any_revision, {}
        for rule in rules:
            self._slots += 1
            slots[rule.name] = self._slots
        teller = Announcements(engine, model, form, rules, slots, identity.revision, keeps)
        self.tellers[engine] = teller
        alike = self.alike.setdefault((model, form), Tellers())
        alike.by_engine[engine] = teller
        alike.of_slot.update(dict.fromkeys(slots.values(), teller))
        alike.step = step_of(known.rules for known in alike.by_engine.values())
        return teller

    def end(self, engine: EngineKey) -> Announcements | None:
        """End the announcements of an engine, and return them; None if it had none."""
        teller = self.tellers.pop(engine, None)
        if teller is None:
            return None
        alike = self.alike[teller.model, teller.form]
        del alike.by_engine[engine]
        for slot in teller.slots.values():
            del alike.of_slot[slot]
        self.gone.extend(teller.slots.values())
        alike.step = step_of(known.rules for known in alike.by_engine.values())
        if not alike.by_engine:
            del self.alike[teller.model, teller.form]
        return teller

    def held_in(self, segment: Segment, kind: Kind) -> list[Change]:
        """Return what engines are known to hold of a segment, as changes of a ``kind``."""
        scope = segment.scope
        alike = self.alike.get((scope.model, scope.form)) if scope is not None else None
        if scope is None or alike is None:
            return []
        return [
            Change(kind, teller, teller.groups[slot], scope.revision, scope.salt, hashes)
            for slot, bits in segment.held.items()
            if (teller := alike.of_slot.get(slot)) and (hashes := segment.hashes_at(bits))
        ]

    def find(
        self, alike: Tellers, keys: HashKeys, ends: HashKeys, positions: Sequence[int]
    ) -> list[Held]:
        """Return how many tokens of a chain each engine holds; engines that hold none are left out.

        A state may also stand at one of ``positions`` (in tokens), whose keys are ``ends``.
        """
        held = _by_engine(alike, self.index.look(keys, alike.step))
        tails = _by_engine(alike, self.index.look(ends, 0)) if positions else {}
        holders = []
        for engine in held.keys() | tails.keys():
            teller, groups = alike.by_engine[engine], held.get(engine, {})
            quantum_tokens = teller.form.quantum_tokens
            tokens = longest(teller.rules, groups, len(keys)) * quantum_tokens
            there = (1 << len(positions)) - 1
            for rule in teller.rules:
                there &= tails.get(engine, {}).get(rule.name, 0)
            while there and (last := positions[there.bit_length() - 1]) > tokens:
                count = last // quantum_tokens
                if all(rule.reaches(groups.get(rule.name, 0), count) for rule in teller.rules):
                    tokens = last
                there ^= 1 << there.bit_length() - 1
            if tokens:
                holders.append(Held(engine, tokens))
        return holders

    def count(self, teller: Announcements) -> dict[str, int]:
        """Return the number of an engine's holdings by group."""
        return {group: self.index.counts.get(slot, 0) for group, slot in teller.slots.items()}

    def keep_within(self, limit_bytes: int, log: ChangeLog | None = None) -> None:
        """Drop holdings down to a limit: of engines that left, then the least recently used."""
        while self.index.size_bytes > limit_bytes and self.gone:
            if not self.index.forget(self.gone[0], 16):
                self.gone.popleft()
        while self.index.size_bytes > limit_bytes and not self.index.empty:
            if log is not None:
                for change in self.held_in(self.index.oldest, Kind.EVICTED):
                    log.add(change)
            self.forgotten += self.index.drop_oldest()

    def clear(self, segments: int) -> int:
        """Clear at most ``segments`` of engines that left; return the unused allowance."""
        while self.gone and segments > 0:
            before = self.index.segments_of(self.gone[0])
            left = self.index.forget(self.gone[0], segments)
            segments -= before - left
            if not left:
                self.gone.popleft()
        return segments


def _by_engine(alike: Tellers, bits_by_slot: Mapping[int, int]) -> dict[EngineKey, dict[str, int]]:
    """Return the bits of slots by engine and group, without slots of engines that left."""
    held: dict[EngineKey, dict[str, int]] = {}
    for slot, bits in bits_by_slot.items():
        teller = alike.of_slot.get(slot)
        if teller is not None:
            held.setdefault(teller.engine, {})[teller.groups[slot]] = bits
    return held


CLEARED_AT_ONCE = 200
"""Segments per tick: under a millisecond, and a million holdings in a few seconds."""


class Prefixes:
    """The holdings of all tenants."""

    def __init__(self, limits: Limits, secret: bytes = b"") -> None:
        """Begin without holdings; ``secret`` is that of `Keyer`."""
        self.holders: dict[str, Holders] = {}
        """Holders of each tenant that has any."""
        self.size_bytes = 0
        """Estimated memory of all holdings."""
        self.asked = self.found = 0
        """Chains that were looked up, and how many of these somebody held a part of."""
        self.told_again = 0
        """How often an engine was asked to announce everything again."""
        self.forgotten = 0
        """Number of holdings that were dropped for lack of memory."""
        self.logs: dict[str, ChangeLog] = {}
        """The changes of each tenant that somebody watches or has watched."""
        self._limits = limits
        self._keyer = Keyer(secret)
        self._awaited: set[EngineKey] = set()
        """Engines whose batches are ignored until they begin again with batch 1."""

    def hear(self, engine: EngineRecord, batch: Batch) -> list[Action]:
        """Process an engine's batch of evictions and holdings.

        Batch 1 begins anew and discards earlier announcements. A gap in the batch numbers means
        that batches were lost: the broker discards everything and asks the engine to announce all
        again.

        Raises `ChainFormError` if the form differs from that of batch 1 or does not fit the
        engine's blocks, `HoldingsError` for a revision or a group that the engine lacks, and what
        `ModelIdentity.check_weights` raises. Such a batch counts as received, but its content is
        ignored.
        """
        engine.check_there()
        key = engine.key
        teller = self._begin(engine, batch.form) if batch.number == 1 else self.teller(key)
        if teller is None or batch.number != teller.heard + 1:
            return self._ask_again(key)
        teller.heard = batch.number
        if batch.form != teller.form:
            raise ChainFormError(
                f"engine {key.engine_id} began with hashes by {teller.form}, but batch "
                f"{batch.number} has hashes by {batch.form}: begin again with batch 1",
                engine=key.engine_id,
            )
        for run in (*batch.evicted, *batch.held):
            if run.group not in engine.block_tokens:
                raise HoldingsError(
                    f"engine {key.engine_id} has no group {run.group[:64]!r}; it has "
                    f"{sorted(engine.block_tokens)}",
                    engine=key.engine_id,
                    group=run.group[:64],
                )
        if not engine.has_revision(batch.revision):
            raise HoldingsError(
                f"engine {key.engine_id} announces states of revision "
                f"{engine.revision_said(batch.revision)!r}, but its weights are of "
                f"{engine.revision!r}",
                engine=key.engine_id,
                field="revision",
            )
        holders = self.holders[key.tenant]
        self._take(holders, teller, batch, engine.identity(engine.revision_said(batch.revision)))
        self._keep_within(holders, self.logs.get(key.tenant))
        return []

    def skip(self, engine: EngineKey, number: int) -> None:
        """Count an unreadable batch as received, and ignore its content."""
        teller = self.teller(engine)
        if teller is not None and number == teller.heard + 1:
            teller.heard = number

    def teller(self, engine: EngineKey) -> Announcements | None:
        """Return an engine's announcements; None if it announces nothing."""
        holders = self.holders.get(engine.tenant)
        return holders.tellers.get(engine) if holders else None

    def _begin(self, engine: EngineRecord, form: HashForm) -> Announcements:
        self.forget(engine.key)
        self._awaited.add(engine.key)
        engine.identity().check_weights()
        rules = rules_of(engine.layout, form.quantum_tokens)
        if rules is None:
            blocks = {group: size for group, size in engine.block_tokens.items() if size}
            raise ChainFormError(
                f"engine {engine.key.engine_id} hashes after every {form.quantum_tokens} tokens, "
                f"which does not divide the tokens of its blocks: {blocks}",
                engine=engine.key.engine_id,
            )
        self._awaited.discard(engine.key)
        holders = self.holders.setdefault(engine.key.tenant, Holders())
        teller = holders.begin(engine.key, engine.identity(), form, rules, engine.keeps)
        if (log := self.logs.get(engine.key.tenant)) is not None:
            log.add(Change(Kind.BEGAN, teller))
        return teller

    def _ask_again(self, engine: EngineKey) -> list[Action]:
        if engine in self._awaited:
            return []
        self.forget(engine)
        self._awaited.add(engine)
        self.told_again += 1
        return [TellHoldings(engine)]

    def _take(
        self, holders: Holders, teller: Announcements, batch: Batch, model: ModelIdentity
    ) -> None:
        revision, salt = model.revision, batch.salt
        log = self.logs.get(teller.engine.tenant)
        scope = Scope(teller.model, teller.form, revision, salt)

        def keys(hashes: bytes) -> HashKeys:
            return self._keyer.keys(model, teller.form, salt, hashes)

        def note(kind: Kind, run: HashRun) -> None:
            if log is not None:
                log.add(Change(kind, teller, run.group, revision, salt, run.hashes))

        before_bytes = holders.index.size_bytes
        for run in batch.evicted:
            if run.group in teller.slots:
                holders.index.evict(teller.slots[run.group], keys(run.hashes))
                note(Kind.EVICTED, run)
        # The longest run first: shorter runs, such as snapshots within it, then find their places.
        for run in sorted(batch.held, key=lambda run: -len(run.hashes)):
            if run.group in teller.slots:
                hashes = run.hashes if log is None else _distinct(run.hashes, teller.form)
                parent = keys(run.parent).values[0] if run.parent else None
                named = None if log is None else (scope, hashes)
                holders.index.hold(teller.slots[run.group], keys(hashes), parent, named)
                note(Kind.HELD, run)
        self.size_bytes += holders.index.size_bytes - before_bytes

    def _keep_within(self, holders: Holders, log: ChangeLog | None) -> None:
        """Apply the tenant's limit and the room that others leave; drop only its own holdings."""
        before_bytes, before = holders.index.size_bytes, holders.forgotten
        others_bytes = self.size_bytes - holders.index.size_bytes
        left_bytes = self._limits.max_holdings_bytes - others_bytes
        holders.keep_within(min(self.limit_bytes, left_bytes), log)
        self.size_bytes += holders.index.size_bytes - before_bytes
        self.forgotten += holders.forgotten - before

    @property
    def limit_bytes(self) -> int:
        """Return the limit for a tenant's holdings if other tenants leave that much."""
        most_bytes = self._limits.max_holdings_bytes
        return min(self._limits.tenant_max_holdings_bytes or most_bytes, most_bytes)

    def forget(self, engine: EngineKey) -> None:
        """Forget the holdings of an engine, because its session ended or it begins anew."""
        self._awaited.discard(engine)
        if (holders := self.holders.get(engine.tenant)) is not None:
            teller = holders.end(engine)
            log = self.logs.get(engine.tenant)
            if log is not None and teller is not None:
                log.add(Change(Kind.ENDED, teller))
            self._drop_empty(engine.tenant)

    def find(self, tenant: str, chain: Chain) -> list[Held]:
        """Return how many tokens of a chain each engine of a tenant holds.

        Raises `ChainFormError` if engines announce holdings of that model, but none with this hash
        form, and what `ModelIdentity.check_weights` raises.
        """
        chain.model.check_weights()
        self.asked += 1
        holders = self.holders.get(tenant)
        if holders is None:
            return []
        served = chain.model.of_any_revision
        alike = holders.alike.get((served, chain.form))
        if alike is None:
            forms = [str(form) for model, form in holders.alike if model == served]
            if forms:
                raise ChainFormError(
                    f"no engine of this model hashes by {chain.form}; they hash by "
                    f"{', '.join(sorted(forms))}"
                )
            return []
        form = chain.form
        count = len(chain.hashes) // form.hash_bytes
        if chain.below_tokens:
            count = min(count, (chain.below_tokens - 1) // form.quantum_tokens)
        hashes = chain.hashes[: count * form.hash_bytes]
        keys = self._keyer.keys(chain.model, form, chain.salt, hashes)
        ends = [
            end
            for end in chain.ends
            if end.position_tokens // form.quantum_tokens <= count
            and (not chain.below_tokens or end.position_tokens < chain.below_tokens)
        ]
        at_ends = b"".join(end.hashed for end in ends)
        tails = self._keyer.keys(chain.model, form, chain.salt, at_ends) if ends else keys
        held = holders.find(alike, keys, tails, [end.position_tokens for end in ends])
        self.found += bool(held)
        return held

    def tick(self) -> None:
        """Clear some holdings of engines that left."""
        left = CLEARED_AT_ONCE
        for tenant, holders in list(self.holders.items()):
            if not holders.gone or left <= 0:
                continue
            before_bytes = holders.index.size_bytes
            left = holders.clear(left)
            self.size_bytes += holders.index.size_bytes - before_bytes
            self._drop_empty(tenant)

    def follow(self, tenant: str, wake: Callable[[], object]) -> tuple[Follower, list[Action]]:
        """Return a follower of a tenant's holdings; ``wake`` is called after each change.

        Hashes are kept from the first follower on. So engines that have reported must report again:
        each then begins anew, as it does after a lost batch.
        """
        log, actions = self.logs.get(tenant), list[Action]()
        if log is None:
            log = self.logs[tenant] = ChangeLog()
            if (holders := self.holders.get(tenant)) is not None:
                actions += [TellHoldings(engine) for engine in holders.tellers]
                self.told_again += len(actions)
        log.wakers.add(wake)
        return Follower(log, partial(self._snapshot, tenant)), actions

    def unfollow(self, tenant: str, wake: Callable[[], object]) -> None:
        """End a follower. The log stays as long as the tenant has holdings."""
        self.logs[tenant].wakers.discard(wake)
        self._drop_log(tenant)

    def _snapshot(self, tenant: str) -> Iterator[Change]:
        """Yield what a tenant's engines hold. Between two changes engines may report more."""
        holders = self.holders.get(tenant)
        if holders is None:
            return
        yield from [Change(Kind.BEGAN, teller) for teller in holders.tellers.values()]
        for segment in holders.index.segments():
            yield from holders.held_in(segment, Kind.HELD)

    def _drop_empty(self, tenant: str) -> None:
        if self.holders[tenant].empty:
            del self.holders[tenant]
            self._drop_log(tenant)

    def _drop_log(self, tenant: str) -> None:
        log = self.logs.get(tenant)
        if log is not None and not log.wakers and tenant not in self.holders:
            del self.logs[tenant]


def _distinct(hashes: bytes, form: HashForm) -> bytes:
    """Return the hashes without repetitions."""
    steps = range(0, len(hashes), form.hash_bytes)
    return b"".join(dict.fromkeys(hashes[at : at + form.hash_bytes] for at in steps))
