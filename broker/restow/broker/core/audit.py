"""The audit: invariants of the directory, which hold between any two events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf

from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.common.pair import PairPlan, pair_bytes
from restow.broker.core.engine_events import Directory
from restow.broker.core.engines.account import ENGINE_BYTES, HANDOFF_BYTES
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import MAX_DELIVERIES, Handoff


def _check_deliveries(handoff: Handoff) -> Iterator[str]:
    """Yield contradictions between a publication and its deliveries."""
    name, deliveries = handoff.handoff_id, handoff.deliveries
    if handoff.shared and handoff.destination is not None:
        yield f"handoff {name} is a shared publication, but has a demand of its own"
    if not handoff.shared and deliveries.by_engine:
        yield f"handoff {name} has deliveries, but nobody named readers"
    if len(deliveries.by_engine) > MAX_DELIVERIES:
        yield f"handoff {name} has {len(deliveries.by_engine)} deliveries"
    taken = deliveries.done + deliveries.declined + len(deliveries.reading)
    if taken > deliveries.readers and not handoff.ended:
        yield f"handoff {name} has more deliveries than readers: {deliveries.in_words()}"
    if deliveries.served and not handoff.ended:
        yield f"handoff {name} has served all readers, but is live"
    for key, delivery in deliveries.by_engine.items():
        if delivery.parent is not handoff or delivery.side is not handoff.side:
            yield f"a delivery of handoff {name} to {key.engine_id} belongs to another publication"
        if handoff.ended and not delivery.ended:
            yield f"handoff {name} has ended, but its delivery to {key.engine_id} is live"
        if not delivery.ended and delivery.lease.until_s != handoff.lease.until_s:
            yield f"handoff {name} and its delivery to {key.engine_id} have different leases"
        if delivery.granted and delivery.lease.grant_until_s >= handoff.lease.until_s:
            yield f"handoff {name} may be read by {key.engine_id} after its lease"


def audit(directory: Directory) -> list[str]:
    """Return all violated invariants of the directory; empty if there are none."""
    ledger = directory.ledger
    whole = (*ledger.live.values(), *ledger.ended.values())
    parts = (part for handoff in whole for part in handoff.deliveries.by_engine.values())
    ended = (*ledger.ended.values(), *(part for part in parts if part.ended))
    return [
        *_check_tables(directory),
        *_of_each(_check_live, ledger.by_number.values()),
        *_of_each(_check_deliveries, whole),
        *_check_flow(directory),
        *_check_wakeups(directory),
        *_of_each(_check_ended, ended),
        *_check_members(directory),
        *_check_tenants(directory),
        *_check_quarantine(directory),
        *_check_prefixes(directory),
        *_check_offers(directory),
    ]


def _of_each(
    check: Callable[[Handoff], Iterator[str]], handoffs: Iterable[Handoff]
) -> Iterator[str]:
    return chain.from_iterable(map(check, handoffs))


def _check_tables(directory: Directory) -> Iterator[str]:
    ledger, limits = directory.ledger, directory.limits
    live = [handoff for whole in ledger.live.values() for handoff in (whole, *whole.deliveries)]
    if sorted(map(id, live)) != sorted(map(id, ledger.by_number.values())):
        yield "the tables of live handoffs by id and by number differ"
    if both := ledger.live.keys() & ledger.ended.keys():
        yield f"handoffs {sorted(both)} are both live and ended"
    for key, handoff in ledger.live.items():
        if key != (handoff.tenant, handoff.handoff_id):
            yield f"handoff {handoff.handoff_id} is filed under {key}"
        if ledger.by_number.get(handoff.number) is not handoff:
            yield f"handoff {handoff.handoff_id} is not filed under its number {handoff.number}"
    for what, size, bound in (
        ("live handoffs", len(ledger.by_number), limits.max_live),
        ("ended handoffs", len(ledger.ended), limits.max_ended),
        ("engines", len(directory.members.engines), limits.max_engines),
        ("plans", len(directory.plans.known), limits.max_pairs),
    ):
        if size > bound:
            yield f"{size} {what}, more than {bound}"


def _check_live(handoff: Handoff) -> Iterator[str]:
    name, source, destination = handoff.handoff_id, handoff.source, handoff.destination
    complete = handoff.side.complete
    if handoff.ended or handoff.state.ended:
        yield f"handoff {name} is live and {handoff.state}, ended: {handoff.ended}"
    if handoff.granted != (handoff.state in (State.STAGING, State.READING)):
        yield f"handoff {name} is {handoff.state}, granted: {handoff.granted}"
    if source is None and handoff.side.fenced:
        yield f"handoff {name} is fenced, but nobody publishes it"
    for engine in (source, destination):
        if engine is not None and handoff.number not in engine.handoffs:
            yield f"engine {engine.key.engine_id} does not know its handoff {name}"
        if engine is not None and engine.gone and not handoff.granted:
            yield f"handoff {name} waits for engine {engine.key.engine_id}, which is gone"
    if destination is not None and not destination.has_revision(handoff.demand.revision):
        yield f"handoff {name}: D waits for a state of weights that it no longer has"
    if source is not None and not (complete or source.has_revision(handoff.side.revision)):
        yield f"handoff {name}: P computes a state of weights that it no longer has"
    fenced = source is not None and len(handoff.side.fenced) >= len(source.layout.ranks)
    if complete != (handoff.publication.final and fenced):
        yield f"handoff {name} is complete: {complete}, fenced on all ranks: {fenced}"
    if source is None and destination is None and not handoff.shared:
        yield f"handoff {name} has no side"
    if handoff.state is State.WAITING and complete and not handoff.granted:
        yield f"handoff {name} is complete, but WAITING"
    if not (handoff.state is State.WAITING or complete or handoff.part_tokens):
        yield f"handoff {name} is {handoff.state}, complete: {complete}"
    if handoff.part_tokens and not handoff.granted:
        yield f"handoff {name} reads {handoff.part_tokens} tokens early without a grant"
    fenced_tokens = handoff.side.early_tokens
    used_tokens = max(handoff.early_tokens, 0 if handoff.given_back else handoff.part_tokens)
    if used_tokens > fenced_tokens:
        yield f"handoff {name}: tokens are read that P has not fenced"
    yield from _check_lives(handoff)
    if not handoff.granted:
        if handoff.unsettled or handoff.staged or handoff.pair is not None:
            yield f"handoff {name} is not granted, but has ranks that read or stage"
        if handoff.failure is not None or handoff.given_back:
            yield f"handoff {name} failed with {handoff.failure}, but did not end"
        return
    if (handoff.failure is not None) != handoff.given_back:
        yield f"handoff {name} is given back: {handoff.given_back}, failed: {handoff.failure}"
    if source is None or destination is None or handoff.pair is None:
        yield f"handoff {name} is granted with a side or a plan missing"
        return
    for words in handoff.lease.wrong(handoff.granted_s):
        yield f"handoff {name}: {words}"
    if not handoff.unsettled:
        yield f"handoff {name} is {handoff.state}, but nobody reads"
    if not handoff.unsettled <= handoff.pair.programs.keys():
        yield f"handoff {name} waits for ranks {handoff.unsettled}, which have no program"
    for dst_rank, src_rank in handoff.staged:
        if src_rank not in handoff.pair.staging.get(dst_rank, ()):
            yield f"handoff {name}: rank {src_rank} staged for rank {dst_rank} without an order"
    if handoff.side.revision != destination.revision_said(handoff.demand.revision):
        yield f"handoff {name} gives D a state of other weights"
    if handoff.failure is None and (source.gone or destination.gone):
        yield f"handoff {name} goes on, but an engine is gone"


def _check_lives(handoff: Handoff) -> Iterator[str]:
    """Yield handoffs that go on although an agent was replaced after the first byte was read."""
    source, destination = handoff.source, handoff.destination
    if source is None or destination is None or handoff.lives is None:
        return
    for engine, before in zip((source, destination), handoff.lives, strict=True):
        if engine.replacements != before:
            yield (
                f"handoff {handoff.handoff_id} goes on, but an agent of {engine.key.engine_id} was "
                f"replaced after the first byte was read"
            )


def _check_flow(directory: Directory) -> Iterator[str]:
    """Yield where a destination's reads and queue differ from the handoffs that have a grant."""
    ledger = directory.ledger
    granted, others = set[tuple[EngineKey, int]](), set[tuple[EngineKey, int]]()
    for handoff in ledger.by_number.values():
        if handoff.destination is not None:
            of_d = granted if handoff.granted else others
            of_d.add((handoff.destination.key, handoff.number))
    for engine, number in sorted(granted ^ ledger.flow.reads()):
        words = "has a grant and does not count" if (engine, number) in granted else "has no grant"
        yield f"among the reads of {engine.engine_id}, handoff {number} {words}"
    for engine, number in sorted(ledger.flow.queued() - others):
        yield f"handoff {number} waits for reads of {engine.engine_id}, and needs none"


def _check_wakeups(directory: Directory) -> Iterator[str]:
    """Yield handoffs that wait for an event that has already passed."""
    watched = directory.ledger.deadlines.numbers()
    for handoff in directory.ledger.by_number.values():
        name, source, destination = handoff.handoff_id, handoff.source, handoff.destination
        look_s = handoff.next_look_s()
        if look_s < inf and (handoff.number not in watched or handoff.looked_s > look_s):
            yield f"the clock does not check handoff {name} in time"
        if source is None or destination is None or handoff.granted:
            continue
        _, key, pair = directory.plans.best(source, destination)
        if pair is not None and not isinstance(pair, PairPlan):
            yield f"handoff {name} is live, but nothing can be planned for it"
        if handoff.state is State.READY and source.complete and destination.complete:
            returned = handoff.number in directory.ledger.returned
            if directory.ledger.flow.waits(destination.key, handoff.number):
                continue
            if handoff.parent is not None and not handoff.parent.deliveries.has_place:
                continue
            if returned:
                continue
            if pair is not None and handoff.stands and not directory.granting.draining:
                yield f"handoff {name} could be granted, but is not"
            elif pair is None and handoff.number not in directory.plans.planning.get(key, ()):
                yield f"handoff {name} waits for a plan that nobody makes"


def _check_ended(handoff: Handoff) -> Iterator[str]:
    name = handoff.handoff_id
    if not (handoff.ended and handoff.state.ended):
        yield f"handoff {name} is ended and {handoff.state}, ended: {handoff.ended}"
    if (handoff.state is State.DONE) != (handoff.failure is None):
        yield f"handoff {name} is {handoff.state} with failure {handoff.failure}"
    if handoff.state is State.DONE and handoff.unsettled:
        yield f"handoff {name} is DONE, but ranks {handoff.unsettled} have not settled"
    published = handoff.parent is None and handoff.publication.blocks
    if published or handoff.demand.blocks or handoff.staged:
        yield f"handoff {name} has ended, but keeps its blocks"
    for engine in (handoff.source, handoff.destination):
        if engine is not None and handoff.number in engine.handoffs:
            yield f"engine {engine.key.engine_id} counts handoff {name} as live, but it has ended"


def _check_members(directory: Directory) -> Iterator[str]:
    members, names = directory.members, directory.connections.names
    by_number = directory.ledger.by_number
    named = set(map(id, names.values()))
    engines = members.engines.values()
    held = [a for engine in engines for a in (*engine.agents.values(), *engine.away.values())]
    if named != set(map(id, held)):
        yield "the tables of agents by name and by rank differ"
    for name, agent in names.items():
        away = members.engines[agent.key.engine].away.get(agent.key.rank) is agent
        if agent.gone != away or (agent.tenant, agent.agent_name) != name:
            yield f"agent {agent.agent_name} is filed as {name}, gone: {agent.gone}, away: {away}"
        lost = [peer for peer in agent.peers if (agent.tenant, peer) not in names]
        if lost:
            yield f"agent {name} was not told to forget {sorted(lost)}"
    for key, engine in members.engines.items():
        if engine.gone or engine.key != key:
            yield f"engine {engine.key.engine_id} is filed as {key}, gone: {engine.gone}"
        if engine.complete != (bool(engine.agents) and not engine.missing_ranks):
            complete = f"complete: {engine.complete}, but its agents differ"
            yield f"engine {engine.key.engine_id} is {complete}"
        yield from _check_sides(engine, by_number)


def _check_tenants(directory: Directory) -> Iterator[str]:
    """Yield tenants whose counts differ from a recount."""
    ledger, engines = directory.ledger, directory.members.engines.values()
    remembered: dict[str, list[str]] = {}
    for tenant, handoff_id in ledger.ended:
        remembered.setdefault(tenant, []).append(handoff_id)
    live = Counter(handoff.tenant for handoff in ledger.by_number.values())
    present = Counter(engine.key.tenant for engine in engines)
    keeping = {key.tenant for key in directory.plans.known}.union(ledger.tenants.keeping)
    for tenant in keeping:
        account = ledger.tenants.account(tenant)
        if account.kept_bytes != (kept_bytes := _kept_bytes(directory, tenant)):
            yield f"tenant {tenant} holds {kept_bytes} bytes, but {account.kept_bytes} are counted"
    for tenant in {*remembered, *live, *present, *ledger.tenants.holdings}:
        held = ledger.tenants.of(tenant)
        quarantined = sum(
            len(engine.quarantined) for engine in engines if engine.key.tenant == tenant
        )
        counted = (held.engines, held.live, held.quarantined, list(held.ended))
        recount = (present[tenant], live[tenant], quarantined, remembered.get(tenant, []))
        if counted != recount:
            yield f"tenant {tenant} holds {recount}, but the counts are {counted}"
        if not any(counted):
            yield f"tenant {tenant} holds nothing, but is counted"


def _kept_bytes(directory: Directory, tenant: str) -> int:
    ledger, engines = directory.ledger, directory.members.engines.values()
    own = [engine for engine in engines if engine.key.tenant == tenant]
    live = [handoff for handoff in ledger.by_number.values() if handoff.tenant == tenant]
    agents = [agent for engine in own for agent in (*engine.agents.values(), *engine.away.values())]
    pairs = directory.plans.known.items()
    return sum(
        (
            sum(map(_bytes_of, live)),
            len(own) * ENGINE_BYTES,
            sum({engine.layout_digest: engine.layout_bytes for engine in own}.values()),
            sum(agent.kept_bytes for agent in agents),
            sum(engine.unpublished_fences.size_bytes for engine in own),
            sum(engine.in_use.size_bytes for engine in own if engine.in_use is not None),
            sum(pair_bytes(pair) for key, pair in pairs if key.tenant == tenant),
        )
    )


def _bytes_of(live: Handoff) -> int:
    published_bytes = 0 if live.parent is not None else live.publication.size_bytes
    return HANDOFF_BYTES + published_bytes + live.demand.size_bytes


def _check_quarantine(directory: Directory) -> Iterator[str]:
    quarantine = directory.ledger.quarantine
    held = 0
    for engine in directory.members.engines.values():
        for number in engine.quarantined:
            held += 1
            if number in directory.ledger.by_number:
                yield f"handoff number {number} is both live and in quarantine"
            if not quarantine.ranks(engine, number):
                yield f"handoff number {number} is in quarantine, but waits for no rank"
    if held != len(quarantine):
        yield f"{len(quarantine)} handoffs are in quarantine, but engines know of {held}"


def _check_sides(engine: EngineRecord, by_number: dict[int, Handoff]) -> Iterator[str]:
    for number in engine.handoffs:
        handoff = by_number.get(number)
        if handoff is None or engine not in (handoff.source, handoff.destination):
            yield f"engine {engine.key.engine_id} has no side of handoff number {number}"
    yield from _check_pages(engine, [by_number[number] for number in engine.handoffs])


def _check_pages(engine: EngineRecord, live: list[Handoff]) -> Iterator[str]:
    """Yield differences between an engine's open handoffs and its blocks in use."""
    name, in_use = engine.key.engine_id, engine.in_use
    asking = [handoff for handoff in live if handoff.destination is engine]
    if in_use is None:
        if any(handoff.demand.blocks for handoff in asking):
            yield f"engine {name} has demands, but none of its blocks is in use"
        return
    published = {handoff.side for handoff in live if handoff.source is engine}
    if published != in_use.publications.keys():
        yield f"engine {name} has publications that differ from its blocks in use"
    waiting = {handoff.number for handoff in in_use.demands.values()} - {
        handoff.number for handoff in asking
    }
    if not waiting <= engine.quarantined:
        yield f"engine {name} has blocks in use for ended handoffs {sorted(waiting)}"
    if any(handoff.demand.blocks and not handoff.writing for handoff in asking):
        yield f"engine {name} has a demand whose blocks are not in use"
    yield from (f"engine {name}: {words}" for words in in_use.wrong())


def _check_offers(directory: Directory) -> Iterator[str]:
    """Yield offers without a demand by prefix, and demands by prefix without an offer."""
    for number, offer in directory.offering.open.items():
        handoff = directory.ledger.by_number.get(number)
        if handoff is None:  # it has ended, and the next tick drops the offer
            continue
        name = handoff.handoff_id
        if handoff.demand.prefix is None or handoff.destination is None:
            yield f"handoff {name} is on offer, but nobody asks for it by prefix"
        if handoff.source is not None:
            yield f"handoff {name} is on offer, but {handoff.source.key.engine_id} publishes it"
        if offer.engine is None or offer.engine in offer.left:
            yield f"handoff {name} is on offer to {offer.engine}, and again in {offer.left}"
    for handoff in directory.ledger.by_number.values():
        asked = handoff.demand.prefix is not None and handoff.source is None
        if asked and handoff.number not in directory.offering.open:
            yield f"handoff {handoff.handoff_id} asks for a prefix, but is not on offer"


def _check_prefixes(directory: Directory) -> Iterator[str]:
    """Yield holdings that are miscounted, or whose engine has no session."""
    prefixes, engines = directory.prefixes, directory.members.engines
    counted_bytes = sum(held.index.size_bytes for held in prefixes.holders.values())
    if counted_bytes != prefixes.size_bytes:
        yield f"holdings take {counted_bytes} bytes, but {prefixes.size_bytes} are counted"
    for tenant, holders in prefixes.holders.items():
        for key, teller in holders.tellers.items():
            engine = engines.get(key)
            if engine is None or not engine.has_session:
                yield f"engine {key.engine_id} of {tenant} has no session, but has holdings"
            elif engine.layout.model.identity.of_any_revision != teller.model:
                yield f"engine {key.engine_id} of {tenant} has holdings of another model"
        slots = {slot for teller in holders.tellers.values() for slot in teller.slots.values()}
        if lost := holders.index.counts.keys() - slots - set(holders.gone):
            yield f"slots {sorted(lost)} of {tenant} have holdings, but no engine has these slots"
