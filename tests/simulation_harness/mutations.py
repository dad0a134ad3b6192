"""Promises taken out of the code, each by its name: histories must find that they are missing."""

from __future__ import annotations

from dataclasses import replace

from restow.agents.execute import orders
from restow.agents.reading.reader import Reader
from restow.broker.client import EngineSession
from restow.broker.client.engine.handoff_futures import Delivery
from restow.broker.client.engine.open_handoffs import OpenHandoffs
from restow.broker.core.agent_events import Reports
from restow.broker.core.common.actions import Action
from restow.broker.core.common.events import Failure, Settlement
from restow.broker.core.common.limits import Limits
from restow.broker.core.connections import Connections
from restow.broker.core.engine_events import Directory
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.blocks import PagesInUse
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import Demand
from restow.broker.core.handoffs.handoff import Deliveries, Handoff
from restow.broker.core.handoffs.lease import Lease
from restow.broker.core.handoffs.publication import Publication, SourceSide
from restow.broker.core.ledger.known_ends import KnownWord
from restow.broker.core.ledger.ledger import Ledger, Readers
from restow.broker.core.offering import Offering
from restow.v1 import agent_link_pb2
from simulation_harness import history as histories
from simulation_harness import kept_prefixes
from simulation_harness.history import History
from simulation_harness.misplaced import MISPLACED
from simulation_harness.several.mutations import MUTATIONS as OF_SEVERAL
from simulation_harness.states.mutations import MUTATIONS as OF_COMMANDS
from simulation_harness.taken_out import Mutation, both, instead, no_actions, nothing
from stamped import requests
from stamped.kept_states import Kept, KeptStates

# -- what stands in place of the code -------------------------------------------------------------


def _same_names(history: History) -> None:
    history.fabric.names_are_unique = False


_settled = Reports.settled


def _settled_any(
    self: Reports, engine: EngineRecord, agent: AgentRecord, settlement: Settlement, now_s: float
) -> list[Action]:
    for number in sorted(engine.handoffs):
        handoff = self._ledger.by_number[number]
        if handoff.destination is engine and handoff.may_read(agent.key.rank):
            settlement = settlement._replace(number=number)
            break
    return _settled(self, engine, agent, settlement, now_s)


_made, _fly = Reader.__init__, Reader._fly


def _made_hasty(self: Reader, *how: object, **more: object) -> None:
    _made(self, *how, **more)  # type: ignore[arg-type]
    self._retire = lambda lane, peers: None  # type: ignore[method-assign]
    self._quarantine_s = 0.0


async def _fly_and_leave(self: Reader, *how: object) -> object:
    failure, _ = await _fly(self, *how)  # type: ignore[arg-type]
    return failure, False


_translate = orders.execute_from_proto


def _for_ever(message: agent_link_pb2.Execute) -> orders.ExecuteOrder:
    return replace(_translate(message), grant_s=1e9)


_cancel = Delivery.cancel


def _cancel_and_free(self: Delivery, msg: object = None) -> bool:
    cancelled = _cancel(self, msg)
    if cancelled:
        self.free()
    return cancelled


def _is_of_the_engine(self: KnownWord, engine: EngineRecord | None, numbers: object) -> bool:
    return engine is not None and engine.key.engine_id == self.counterpart.engine_id


async def _drained(self: EngineSession, timeout_s: float | None = None) -> bool:
    return True


def _spoil(history: History) -> None:
    history.fabric.spoiled = 0.02
    history.unhindered.looks = False


def _as_it_ended(self: Readers, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
    return handoff


def _give_at_once(self: KeptStates, kept: Kept) -> None:
    if kept.evicted and not kept.given:
        kept.given = True
        self._requests.pages.give(kept.ids)


def _revise_only(
    self: Directory, engine: EngineRecord, revision: str, now_s: float
) -> list[Action]:
    engine.revision = revision
    self.prefixes.forget(engine.key)
    return []


def _take_nothing(self: PagesInUse, handoff: Handoff, *words: object) -> None:
    handoff.writing = 0


def _listed_tokens(self: SourceSide) -> int:
    if self.engine is None or self.publication.final:
        return 0
    per_token = [
        len(data) // 4 * self.engine.block_tokens[group]
        for group, data in self.publication.blocks.items()
        if self.engine.block_tokens[group]
    ]
    return min(per_token, default=0)


_renew, _grant = Lease.renew, Lease.grant


def _renew_once(self: Lease, lease_s: float, now_s: float) -> None:
    if not self.until_s:
        _renew(self, lease_s, now_s)


def _grant_longer(self: Lease, limits: Limits, now_s: float) -> Failure | None:
    until_s, self.until_s = self.until_s, self.until_s + limits.grant_s
    try:
        return _grant(self, limits, now_s)
    finally:
        self.until_s = until_s


def _fits_any(self: Demand, handoff_id: str, published: Publication) -> bool:
    return self.takes_sampled and published.sampled_token is not None


_add_message = Handoff.add_demand_message


def _add_message_quietly(self: Handoff, engine: EngineRecord, number: int) -> None:
    told = self.sampled_told
    _add_message(self, engine, number)
    self.sampled_told = told


# -- the promises ---------------------------------------------------------------------------------

_NO_AUDIT = (histories, "audit", no_actions)
_REPLACED = (histories, "REPLACED_OF", 1)
_CHUNKED = (requests, "COMPUTED_IN_CHUNKS", 1.0)
_ATTEMPTED = (histories, "ATTEMPTED", 1.0)
_UNHEARD = (Connections, "_end_words", no_actions)
_PUBLISHED_AGAIN = (OpenHandoffs, "_use_up", nothing)
_TWIN = instead(
    (histories, "COMPUTED_AT_ONCE", 1.0), (OpenHandoffs, "_is_another", lambda *words: False)
)

MUTATIONS: dict[str, Mutation] = {
    # Give the next life of an agent the name of the last one.
    "incarnation": instead(only=["restart_unseen"], first=_same_names),
    # Count a report for the oldest handoff that its rank may read, whatever it reports on.
    "generation": instead((Reports, "settled", _settled_any)),
    # Give up a late read at once, though it may still write.
    "quarantine": instead((Reader, "__init__", _made_hasty), (Reader, "_fly", _fly_and_leave)),
    # Let D's agents read for as long as a read takes.
    "deadline": instead((orders, "execute_from_proto", _for_ever), only=["stall"]),
    # Let an engine drain without waiting for what is open.
    "drain": instead((EngineSession, "drain", _drained), only=["leave"]),
    # Spoil some bytes of what is read, until all faults heal.
    "wire": instead(first=_spoil),
    # Do not compare what P computed with what D asks for.
    "content": instead((Demand, "check_content", nothing)),
    # Tell an engine that asks for a handoff that has ended how it ended.
    "reuse": instead((Handoff, "check_asked_before", nothing)),
    # Give D its pages back as soon as it gives its demand up.
    "cancelled": instead((Delivery, "cancel", _cancel_and_free)),
    # Let a broker ignore for one side what another broker told the other side.
    "ends": instead((Directory, "known_end", no_actions), first=History.lose_ends),
    # Count what one side was told for any handoff that the other side has open under that id.
    "attempt": instead(
        (histories, "USED_AGAIN", 1.0),
        (KnownWord, "is_of", _is_of_the_engine),
        first=History.lose_ends,
    ),
    # Let P publish a second state under an id that it has published whole, and fence it.
    "twin": _TWIN,
    # Let any client do so, also one that does not note what it published: the broker goes on with
    # the state that it was told first.
    "twins": both(_TWIN, instead((Directory, "publication_refused", no_actions))),
    # Give P its pages back when the first of several readers has the state.
    "served": instead((Deliveries, "served", property(lambda self: self.done > 0))),
    # Tell a D that asks when all readers have the state how the publication ended: DONE.
    "late": instead((Readers, "late", _as_it_ended)),
    # Let every D that asks read at once, however many readers P has named.
    "places": instead(
        (histories, "FOR_SEVERAL", 1.0), (Deliveries, "has_place", True), only=["stall"]
    ),
    # Let a state that one holder publishes stay on offer to others.
    "offered": instead((Offering, "taken", nothing)),
    # Offer a state to nobody else when the first holder does not answer.
    "next": instead((Offering, "tick", no_actions)),
    # Let an engine use pages again whose state it has published for an offer.
    "pinned": instead(
        (kept_prefixes, "EVICTED", 1.0), (KeptStates, "_give_if_free", _give_at_once)
    ),
    # Let a rank of D that comes back as another process read on where the old one was.
    "rank": instead(_CHUNKED, _UNHEARD, (Handoff, "begun", False), only=["replace_worker"]),
    # Let what an engine had open go on in the next process of its incarnation.
    "process": instead(_UNHEARD, only=["restart_alike"]),
    # Let a session publish an id again that it has given up.
    "given-up": instead(_ATTEMPTED, _PUBLISHED_AGAIN, only=["kill_broker"]),
    # Let any client publish such an id again; the broker keeps fences of unpublished ids.
    "fences": instead(
        _ATTEMPTED, _PUBLISHED_AGAIN, (Directory, "_give_up_unpublished", no_actions)
    ),
    # Give D the state of whichever weights P had.
    "weights": instead(_REPLACED, _NO_AUDIT, (Handoff, "weights_differ", lambda *words: False)),
    # Let the demands of a D go on when its weights are replaced.
    "revised": instead(_REPLACED, (Directory, "revise", _revise_only)),
    # Let several open demands of an engine name the same pages.
    "twice": instead(
        _NO_AUDIT, (PagesInUse, "take", _take_nothing), (PagesInUse, "forget_held", nothing)
    ),
    # Let leading tokens be read as soon as their blocks are published.
    "chunk": instead(_CHUNKED, (SourceSide, "early_tokens", property(_listed_tokens))),
    # Tell D DONE when it has read leading tokens.
    "part": instead(_CHUNKED, (Handoff, "part_tokens", property(lambda self: 0, nothing))),
    # End P's lease as its first chunk said, and let reads of later chunks go on.
    "leased": instead(_CHUNKED, (Lease, "renew", _renew_once), (Lease, "grant", _grant_longer)),
    # Let D use what it is still reading when P takes the pages back.
    "preempted": instead(_CHUNKED, (requests, "PREEMPTED", 1.0), (Ledger, "take_back", no_actions)),
    # Tell D the token that P sampled behind another prompt.
    "sampled of any": instead((Demand, "fits_sampled", _fits_any)),
    # Do not tell the token to a D again whose stream broke.
    "sampled once": instead((Handoff, "add_demand_message", _add_message_quietly)),
    **MISPLACED,
    **OF_SEVERAL,
    **OF_COMMANDS,
}
"""Where chance alone brings a fault about too seldom, it happens in each history, or alone."""
