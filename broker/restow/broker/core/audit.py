"""What must be true of publications and their deliveries between two events, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from restow.broker.core.common.keys import PairKey, State
from restow.broker.core.common.pair import PairPlan, pair_bytes
from restow.broker.core.directory import Directory
from restow.broker.core.engines.account import ENGINE_BYTES, handoff_bytes
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import MAX_DELIVERIES, Handoff
from restow.broker.core.ledger.ledger import Ledger


def ended_of(ledger: Ledger) -> Iterator[Handoff]:
    """All that has ended and is remembered: handoffs, and deliveries of live and ended ones."""
    yield from ledger.ended.values()
    for handoff in (*ledger.live.values(), *ledger.ended.values()):
        yield from (one for one in handoff.deliveries.by_engine.values() if one.ended)


def check_deliveries(ledger: Ledger) -> Iterator[str]:
    """Every publication agrees with its deliveries."""
    for handoff in (*ledger.live.values(), *ledger.ended.values()):
        yield from _check(handoff)


def _check(handoff: Handoff) -> Iterator[str]:
    name, deliveries = handoff.handoff_id, handoff.deliveries
    if handoff.shared and handoff.destination is not None:
        yield f"handoff {name} is a publication, and has a demand of its own"
    if not handoff.shared and deliveries.by_engine:
        yield f"handoff {name} has deliveries, and nobody named readers"
    if len(deliveries.by_engine) > MAX_DELIVERIES:
        yield f"handoff {name} has {len(deliveries.by_engine)} deliveries"
    taken = deliveries.done + deliveries.declined + len(deliveries.reading)
    if taken > deliveries.readers and not handoff.ended:
        yield f"handoff {name} has more deliveries than readers: {deliveries.in_words()}"
    if deliveries.served and not handoff.ended:
        yield f"handoff {name} is served and lives"
    for key, one in deliveries.by_engine.items():
        if one.parent is not handoff or one.side is not handoff.side:
            yield f"a delivery of handoff {name} to {key.engine_id} is of another publication"
        if handoff.ended and not one.ended:
            yield f"handoff {name} has ended, and its delivery to {key.engine_id} lives"
        if not one.ended and one.lease.until_s != handoff.lease.until_s:
            yield f"handoff {name} has another lease than its delivery to {key.engine_id}"
        if one.granted and one.lease.grant_until_s >= handoff.lease.until_s:
            yield f"handoff {name} may be read by {key.engine_id} after its lease"


def audit(directory: Directory) -> list[str]:
    """Everything that is wrong with the directory; empty when all is well."""
    return [
        *_check_tables(directory),
        *(words for one in directory.ledger.by_number.values() for words in _check_live(one)),
        *check_deliveries(directory.ledger),
        *_check_wakeups(directory),
        *(words for one in ended_of(directory.ledger) for words in _check_ended(one)),
        *_check_members(directory),
        *_check_tenants(directory),
        *_check_quarantine(directory),
        *_check_prefixes(directory),
        *_check_offers(directory),
    ]


def _check_tables(directory: Directory) -> Iterator[str]:
    ledger, limits = directory.ledger, directory.limits
    live = [one for whole in ledger.live.values() for one in (whole, *whole.deliveries)]
    if sorted(map(id, live)) != sorted(map(id, ledger.by_number.values())):
        yield "the tables of live handoffs by id and by number differ"
    if both := ledger.live.keys() & ledger.ended.keys():
        yield f"handoffs {sorted(both)} are live and ended"
    for key, handoff in ledger.live.items():
        if key != (handoff.tenant, handoff.handoff_id):
            yield f"handoff {handoff.handoff_id} is filed under {key}"
        if ledger.by_number.get(handoff.number) is not handoff:
            yield f"handoff {handoff.handoff_id} is not filed under its number {handoff.number}"
    for what, size, bound in (
        ("live handoffs", len(ledger.by_number), limits.max_live),
        ("ended handoffs", len(ledger.ended), limits.max_ended),
        ("engines", len(directory.members.engines), limits.max_engines),
        ("plans", len(directory.granting.pairs), limits.max_pairs),
    ):
        if size > bound:
            yield f"{size} {what}, more than {bound}"


def _check_live(handoff: Handoff) -> Iterator[str]:
    name, source, destination = handoff.handoff_id, handoff.source, handoff.destination
    if handoff.ended or handoff.state.ended:
        yield f"handoff {name} is live and {handoff.state}, ended: {handoff.ended}"
    if handoff.granted != (handoff.state in (State.STAGING, State.READING)):
        yield f"handoff {name} is {handoff.state}, granted: {handoff.granted}"
    if source is None and handoff.fenced:
        yield f"handoff {name} is fenced and nobody publishes it"
    for engine in (source, destination):
        if engine is not None and handoff.number not in engine.handoffs:
            yield f"engine {engine.key.engine_id} does not know its handoff {name}"
        if engine is not None and engine.gone and not handoff.granted:
            yield f"handoff {name} waits for engine {engine.key.engine_id}, which is gone"
    if destination is not None and not destination.has_revision(handoff.demand.revision):
        yield f"handoff {name}: D waits for a state of weights that it has no longer"
    if source is not None and not (handoff.complete or source.has_revision(handoff.side.revision)):
        yield f"handoff {name}: P computes a state of weights that it has no longer"
    if source is None and destination is None and not handoff.shared:
        yield f"handoff {name} has no side"
    if handoff.state is State.WAITING and handoff.complete and not handoff.granted:
        yield f"handoff {name} is complete, and WAITING"
    if not (handoff.state is State.WAITING or handoff.complete or handoff.part_tokens):
        yield f"handoff {name} is {handoff.state}, complete: {handoff.complete}"
    if handoff.part_tokens and not handoff.granted:
        yield f"handoff {name} reads {handoff.part_tokens} tokens early, and is not granted"
    fenced_tokens = handoff.side.early_tokens
    used_tokens = max(handoff.early_tokens, 0 if handoff.given_back else handoff.part_tokens)
    if used_tokens > fenced_tokens:
        yield f"handoff {name}: tokens are read that P has not fenced"
    yield from _check_lives(handoff)
    if not handoff.granted:
        if handoff.unsettled or handoff.staged or handoff.pair is not None:
            yield f"handoff {name} is not granted, and has ranks that read or stage"
        if handoff.failure is not None or handoff.given_back:
            yield f"handoff {name} failed with {handoff.failure} and did not end"
        return
    if (handoff.failure is not None) != handoff.given_back:
        yield f"handoff {name} is given back: {handoff.given_back}, failed: {handoff.failure}"
    if source is None or destination is None or handoff.pair is None:
        yield f"handoff {name} is granted with a side or a plan missing"
        return
    for words in handoff.lease.wrong(handoff.granted_s):
        yield f"handoff {name}: {words}"
    if not handoff.unsettled:
        yield f"handoff {name} is {handoff.state} and nobody reads"
    if not handoff.unsettled <= handoff.pair.programs.keys():
        yield f"handoff {name} waits for ranks {handoff.unsettled}, which have no program"
    for dst_rank, src_rank in handoff.staged:
        if src_rank not in handoff.pair.staging.get(dst_rank, ()):
            yield f"handoff {name}: rank {src_rank} staged for rank {dst_rank} unasked"
    if handoff.side.revision != destination.revision_said(handoff.demand.revision):
        yield f"handoff {name} gives D a state of other weights"
    if handoff.failure is None and (source.gone or destination.gone):
        yield f"handoff {name} goes on though an engine is gone"


def _check_lives(handoff: Handoff) -> Iterator[str]:
    """From the first byte read for a delivery on, every rank of both sides is the same agent."""
    source, destination = handoff.source, handoff.destination
    if source is None or destination is None or handoff.lives is None:
        return
    for engine, before in zip((source, destination), handoff.lives, strict=True):
        if engine.replacements != before:
            yield (
                f"handoff {handoff.handoff_id} goes on, and an agent of {engine.key.engine_id} was "
                f"replaced after the first byte was read"
            )


def _check_wakeups(directory: Directory) -> Iterator[str]:
    """Nothing waits for an event that has passed."""
    watched = directory.ledger.deadlines.numbers()
    for handoff in directory.ledger.by_number.values():
        name, source, destination = handoff.handoff_id, handoff.source, handoff.destination
        look_s = handoff.next_look_s()
        if look_s < inf and (handoff.number not in watched or handoff.looked_s > look_s):
            yield f"the clock does not look at handoff {name} in time"
        if source is None or destination is None or handoff.granted:
            continue
        hosts = directory.probing.costs(source, destination)
        key = PairKey(handoff.tenant, source.layout_digest, destination.layout_digest, hosts)
        pair = directory.granting.pairs.get(key)
        if pair is not None and not isinstance(pair, PairPlan):
            yield f"handoff {name} is live though nothing can be planned for it"
        if handoff.state is State.READY and source.complete and destination.complete:
            returned = handoff.number in directory.ledger.returned
            if directory.ledger.flow.waits(destination.key, handoff.number):
                continue
            if handoff.parent is not None and not handoff.parent.deliveries.has_place:
                continue
            if returned or directory.probing.awaited_by(handoff.number):
                continue
            if pair is not None and not directory.granting.draining:
                yield f"handoff {name} could be granted and is not"
            elif pair is None and handoff.number not in directory.granting.planning.get(key, ()):
                yield f"handoff {name} waits for a plan that nobody makes"


def _check_ended(handoff: Handoff) -> Iterator[str]:
    name = handoff.handoff_id
    if not (handoff.ended and handoff.state.ended):
        yield f"handoff {name} is ended and {handoff.state}, ended: {handoff.ended}"
    if (handoff.state is State.DONE) != (handoff.failure is None):
        yield f"handoff {name} is {handoff.state} with failure {handoff.failure}"
    if handoff.state is State.DONE and handoff.unsettled:
        yield f"handoff {name} is DONE though ranks {handoff.unsettled} have not settled"
    published = handoff.parent is None and handoff.publication.blocks
    if published or handoff.demand.blocks or handoff.staged:
        yield f"handoff {name} has ended and keeps its blocks"
    for engine in (handoff.source, handoff.destination):
        if engine is not None and handoff.number in engine.handoffs:
            yield f"engine {engine.key.engine_id} counts handoff {name}, which has ended, as live"


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
        yield from _check_sides(engine, by_number)


def _check_tenants(directory: Directory) -> Iterator[str]:
    """Every tenant's counts are what a search would find."""
    ledger, engines = directory.ledger, directory.members.engines.values()
    remembered: dict[str, list[str]] = {}
    for tenant, handoff_id in ledger.ended:
        remembered.setdefault(tenant, []).append(handoff_id)
    live = Counter(one.tenant for one in ledger.by_number.values())
    present = Counter(engine.key.tenant for engine in engines)
    keeping = {key.tenant for key in directory.granting.pairs}.union(ledger.tenants.keeping)
    for tenant in keeping:
        account = ledger.tenants.account(tenant)
        if account.kept_bytes != (kept_bytes := _kept_bytes(directory, tenant)):
            yield f"tenant {tenant} has {kept_bytes} bytes kept, and {account.kept_bytes} counted"
    for tenant in {*remembered, *live, *present, *ledger.tenants.holdings}:
        held = ledger.tenants.of(tenant)
        quarantined = sum(len(one.quarantined) for one in engines if one.key.tenant == tenant)
        counted = (held.engines, held.live, held.quarantined, list(held.ended))
        found = (present[tenant], live[tenant], quarantined, remembered.get(tenant, []))
        if counted != found:
            yield f"tenant {tenant} holds {found}, and is counted to hold {counted}"
        if held.empty:
            yield f"tenant {tenant} holds nothing and is counted"


def _kept_bytes(directory: Directory, tenant: str) -> int:
    ledger, engines = directory.ledger, directory.members.engines.values()
    own = [engine for engine in engines if engine.key.tenant == tenant]
    agents = [one for engine in own for one in (*engine.agents.values(), *engine.away.values())]
    pairs = directory.granting.pairs.items()
    return sum(
        (
            sum(map(_bytes_of, (one for one in ledger.by_number.values() if one.tenant == tenant))),
            len(own) * ENGINE_BYTES,
            sum({engine.layout_digest: engine.layout_bytes for engine in own}.values()),
            sum(agent.kept_bytes for agent in agents),
            sum(engine.early_fences.size_bytes for engine in own),
            sum(one.in_use.size_bytes for one in own if one.in_use is not None),
            sum(pair_bytes(pair) for key, pair in pairs if key.tenant == tenant),
        )
    )


def _bytes_of(live: Handoff) -> int:
    published_bytes = 0 if live.parent is not None else live.publication.size_bytes
    return handoff_bytes(live.handoff_id) + published_bytes + live.demand.size_bytes


def _check_quarantine(directory: Directory) -> Iterator[str]:
    quarantine = directory.ledger.quarantine
    held = 0
    for engine in directory.members.engines.values():
        for number in engine.quarantined:
            held += 1
            if number in directory.ledger.by_number:
                yield f"handoff number {number} is live and in quarantine"
            if not quarantine.ranks(engine, number):
                yield f"handoff number {number} is in quarantine and waits for no rank"
    if held != len(quarantine):
        yield f"{len(quarantine)} handoffs are in quarantine, engines know of {held}"


def _check_sides(engine: EngineRecord, by_number: dict[int, Handoff]) -> Iterator[str]:
    for number in engine.handoffs:
        handoff = by_number.get(number)
        if handoff is None or engine not in (handoff.source, handoff.destination):
            yield f"engine {engine.key.engine_id} has no side of handoff number {number}"
    yield from _check_pages(engine, [by_number[number] for number in engine.handoffs])


def _check_pages(engine: EngineRecord, live: list[Handoff]) -> Iterator[str]:
    """Every open word of an engine has its blocks in use, and no other one has."""
    name, in_use = engine.key.engine_id, engine.in_use
    asking = [one for one in live if one.destination is engine]
    if in_use is None:
        if any(one.demand.blocks for one in asking):
            yield f"engine {name} has demands, and none of its blocks is in use"
        return
    published = {one.side for one in live if one.source is engine}
    if published != in_use.publications.keys():
        yield f"engine {name} has other publications than those whose blocks are in use"
    waiting = {one.number for one in in_use.demands.values()} - {one.number for one in asking}
    if not waiting <= engine.quarantined:
        yield f"engine {name} has blocks in use for handoffs {sorted(waiting)}, which have ended"
    if any(one.demand.blocks and not one.writing for one in asking):
        yield f"engine {name} has a demand whose blocks are not in use"
    yield from (f"engine {name}: {words}" for words in in_use.wrong())


def _check_offers(directory: Directory) -> Iterator[str]:
    """What is on offer is asked for, by its prefix, and nobody publishes it."""
    for number, offer in directory.offering.open.items():
        handoff = directory.ledger.by_number.get(number)
        if handoff is None:  # it has ended, and the next tick drops it
            continue
        name = handoff.handoff_id
        if handoff.demand.prefix is None or handoff.destination is None:
            yield f"handoff {name} is on offer, and nobody asks for it by a prefix"
        if handoff.source is not None:
            yield f"handoff {name} is on offer, and {handoff.source.key.engine_id} publishes it"
        if offer.engine is None or offer.engine in offer.left:
            yield f"handoff {name} is on offer to {offer.engine}, and then to {offer.left}"
    for handoff in directory.ledger.by_number.values():
        asked = handoff.demand.prefix is not None and handoff.source is None
        if asked and handoff.number not in directory.offering.open:
            yield f"handoff {handoff.handoff_id} asks for a prefix, and nobody is offered it"


def _check_prefixes(directory: Directory) -> Iterator[str]:
    """What is held is counted, and told by engines whose session is open."""
    prefixes, engines = directory.prefixes, directory.members.engines
    counted_bytes = sum(one.index.size_bytes for one in prefixes.holders.values())
    if counted_bytes != prefixes.size_bytes:
        yield f"holdings take {counted_bytes} bytes, and {prefixes.size_bytes} are counted"
    for tenant, holders in prefixes.holders.items():
        for key, teller in holders.tellers.items():
            engine = engines.get(key)
            if engine is None or not engine.has_session:
                yield f"engine {key.engine_id} of {tenant} has no session, and holds something"
            elif engine.layout.model.identity.of_any_revision != teller.model:
                yield f"engine {key.engine_id} of {tenant} holds what is of another model"
        slots = {slot for one in holders.tellers.values() for slot in one.slots.values()}
        if lost := holders.index.counts.keys() - slots - set(holders.gone):
            yield f"slots {sorted(lost)} of {tenant} hold something, and are nobody's"
