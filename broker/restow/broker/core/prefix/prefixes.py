"""Prefixes: what engines say that they hold, and what of a chain is held. Hints, never promises.

Pure, as the directory is. What an engine told is forgotten with its stream; a broker that starts
anew is told everything again.
"""

from __future__ import annotations

from restow.broker.core.actions import Action, EngineKey, TellHoldings
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.limits import Limits
from restow.broker.core.prefix.holders import Holders
from restow.broker.core.prefix.keys import Keyer, Keys
from restow.broker.core.prefix.rules import rules_of
from restow.broker.core.prefix.teller import Teller
from restow.broker.core.prefix.words import Batch, Chain, HashForm, Held
from restow.broker.errors import ChainFormError, HoldingsError
from restow.broker.layout.values import ModelIdentity

CLEARED_AT_ONCE = 200
"""Segments, in a tick: under a millisecond, and a million holdings in a few seconds."""


class Prefixes:
    """The holdings of all tenants."""

    def __init__(self, limits: Limits, secret: bytes = b"") -> None:
        """Nobody holds anything. ``secret``: as `Keyer` has it."""
        self.holders: dict[str, Holders] = {}
        """Of each tenant that has any."""
        self.size_bytes = 0
        """About what all of them take."""
        self.asked = self.found = 0
        """Chains that were asked for, and those of them of which somebody held something."""
        self.told_again = 0
        """How often an engine was asked to tell everything again."""
        self.forgotten = 0
        """Holdings that were forgotten for want of room."""
        self._limits = limits
        self._keyer = Keyer(secret)
        self._awaited: set[EngineKey] = set()
        """Engines of which nothing counts until they begin again."""

    def hear(self, engine: EngineRecord, batch: Batch) -> list[Action]:
        """An engine says what it has evicted, and what it holds.

        Batch 1 begins: what was told before counts no more. One that does not follow the last says
        that some were lost: all is forgotten, and to be told again. Raises `ChainFormError` for
        another form than batch 1 had or than the engine's blocks allow, `HoldingsError` for a
        revision that is not the engine's and for a group that it lacks, and like
        `ModelIdentity.check_weights`: the batch was heard, and nothing of it counts.
        """
        engine.check_there()
        key = engine.key
        teller = self._begin(engine, batch.form) if batch.number == 1 else self.teller(key)
        if teller is None or batch.number != teller.heard + 1:
            return self._ask_again(key)
        teller.heard = batch.number
        if batch.form != teller.form:
            raise ChainFormError(
                f"engine {key.engine_id} began to tell of hashes by {teller.form}, and batch "
                f"{batch.number} is of hashes by {batch.form}: begin again with batch 1",
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
                f"engine {key.engine_id} tells of states of revision "
                f"{engine.revision_said(batch.revision)!r}, and its weights are of "
                f"{engine.revision!r}",
                engine=key.engine_id,
                field="revision",
            )
        holders = self.holders[key.tenant]
        self._take(holders, teller, batch, engine.identity(engine.revision_said(batch.revision)))
        self._keep_within(holders)
        return []

    def skip(self, engine: EngineKey, number: int) -> None:
        """A batch can't be read: it was heard, and nothing of it counts."""
        teller = self.teller(engine)
        if teller is not None and number == teller.heard + 1:
            teller.heard = number

    def teller(self, engine: EngineKey) -> Teller | None:
        """What is known of an engine that tells; None: it does not."""
        holders = self.holders.get(engine.tenant)
        return holders.tellers.get(engine) if holders else None

    def _begin(self, engine: EngineRecord, form: HashForm) -> Teller:
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
        return holders.begin(engine.key, engine.identity().of_any_revision, form, rules)

    def _ask_again(self, engine: EngineKey) -> list[Action]:
        if engine in self._awaited:
            return []
        self.forget(engine)
        self._awaited.add(engine)
        self.told_again += 1
        return [TellHoldings(engine)]

    def _take(self, holders: Holders, teller: Teller, batch: Batch, model: ModelIdentity) -> None:
        def keys(hashes: bytes) -> Keys:
            return self._keyer.keys(model, teller.form, batch.salt, hashes)

        before_bytes = holders.index.size_bytes
        for run in batch.evicted:
            if run.group in teller.slots:
                holders.index.evict(teller.slots[run.group], keys(run.hashes))
        # The longest first: shorter ones, such as snapshots within them, then find their places.
        for run in sorted(batch.held, key=lambda one: -len(one.hashes)):
            if run.group in teller.slots:
                parent = keys(run.parent).values[0] if run.parent else None
                holders.index.hold(teller.slots[run.group], keys(run.hashes), parent)
        self.size_bytes += holders.index.size_bytes - before_bytes

    def _keep_within(self, holders: Holders) -> None:
        """A tenant has its own limit, and what others leave; it forgets its own, never theirs."""
        before_bytes, before = holders.index.size_bytes, holders.forgotten
        others_bytes = self.size_bytes - holders.index.size_bytes
        left_bytes = self._limits.max_holdings_bytes - others_bytes
        holders.keep_within(min(self.limit_bytes, left_bytes))
        self.size_bytes += holders.index.size_bytes - before_bytes
        self.forgotten += holders.forgotten - before

    @property
    def limit_bytes(self) -> int:
        """What one tenant's holdings may take, if others leave so much."""
        most_bytes = self._limits.max_holdings_bytes
        return min(self._limits.tenant_max_holdings_bytes or most_bytes, most_bytes)

    def forget(self, engine: EngineKey) -> None:
        """An engine's session has ended, or it begins again: it holds nothing that is known."""
        self._awaited.discard(engine)
        if (holders := self.holders.get(engine.tenant)) is not None:
            holders.end(engine)
            self._drop_empty(engine.tenant)

    def find(self, tenant: str, chain: Chain) -> list[Held]:
        """Who of a tenant holds how much of a chain.

        Raises `ChainFormError` if engines of that model tell, and none of them hashes so, and like
        `ModelIdentity.check_weights`.
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
                    f"no engine of this model hashes by {chain.form}; they do by "
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
            one
            for one in chain.ends
            if one.position_tokens // form.quantum_tokens <= count
            and (not chain.below_tokens or one.position_tokens < chain.below_tokens)
        ]
        at_ends = b"".join(one.hashed for one in ends)
        tails = self._keyer.keys(chain.model, form, chain.salt, at_ends) if ends else keys
        held = holders.find(alike, keys, tails, [one.position_tokens for one in ends])
        self.found += bool(held)
        return held

    def tick(self) -> None:
        """Clear some of what engines held that are gone."""
        left = CLEARED_AT_ONCE
        for tenant, holders in list(self.holders.items()):
            if not holders.gone or left <= 0:
                continue
            before_bytes = holders.index.size_bytes
            left = holders.clear(left)
            self.size_bytes += holders.index.size_bytes - before_bytes
            self._drop_empty(tenant)

    def _drop_empty(self, tenant: str) -> None:
        if self.holders[tenant].empty:
            del self.holders[tenant]
