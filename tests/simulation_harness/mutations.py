"""Promises taken out of the code, each by its name: histories must find that they are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

from restow.agents.execute import orders
from restow.agents.reading.reader import Reader
from restow.broker.client import EngineSession
from restow.broker.client.engine.handoff_futures import Delivery
from restow.broker.client.engine.open_handoffs import OpenHandoffs
from restow.broker.core.common.actions import Action
from restow.broker.core.common.events import Settlement
from restow.broker.core.connections import Connections
from restow.broker.core.directory import Directory
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.blocks import PagesInUse
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import Demand
from restow.broker.core.handoffs.handoff import Deliveries, Handoff
from restow.broker.core.ledger.known_ends import KnownWord
from restow.broker.core.ledger.ledger import Readers
from restow.broker.core.offering import Offering
from restow.broker.core.reports import Reports
from restow.v1 import agent_link_pb2
from simulation_harness.early_mutations import EARLY
from simulation_harness.history import History
from simulation_harness.misplaced import MISPLACED
from simulation_harness.sampled_mutations import SAMPLED
from simulation_harness.several.mutations import MUTATIONS as OF_SEVERAL
from stamped.kept_states import Kept, KeptStates

Mutation = Callable[[History], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def no_incarnation_in_names(history: History) -> Iterator[None]:
    """Give the next life of an agent the name of the last one."""
    history.fabric.names_are_unique = False
    # Where it matters: chance alone brings this about once in a thousand histories.
    if history.faults is not None:
        history.faults.kinds = (history.faults.restart_unseen,)
    yield


@contextlib.contextmanager
def no_generations(history: History) -> Iterator[None]:
    """Count a report for the oldest handoff that its rank may read, whatever it reports on."""
    settled = Reports.settled

    def any_number(
        self: Reports,
        engine: EngineRecord,
        agent: AgentRecord,
        settlement: Settlement,
        now_s: float,
    ) -> list[Action]:
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number[number]
            if handoff.destination is engine and handoff.may_read(agent.key.rank):
                settlement = settlement._replace(number=number)
                break
        return settled(self, engine, agent, settlement, now_s)

    with patch.object(Reports, "settled", any_number):
        yield


@contextlib.contextmanager
def no_quarantine(history: History) -> Iterator[None]:
    """Give up a late read at once, though it may still write."""
    made = Reader.__init__

    def hasty(self: Reader, *how: object, **more: object) -> None:
        made(self, *how, **more)  # type: ignore[arg-type]
        self._retire = lambda lane, peers: None  # type: ignore[method-assign]
        self._quarantine_s = 0.0

    async def not_waiting(self: Reader, *how: object) -> object:
        failure, _ = await fly(self, *how)  # type: ignore[arg-type]
        return failure, False

    fly = Reader._fly
    with patch.object(Reader, "__init__", hasty), patch.object(Reader, "_fly", not_waiting):
        yield


@contextlib.contextmanager
def no_deadline_at_d(history: History) -> Iterator[None]:
    """Let D's agents read for as long as a read takes."""
    translate = orders.execute_from_proto
    # Where it matters: what stood still goes on in the end.
    if history.faults is not None:
        history.faults.kinds = (history.faults.stall,)

    def for_ever(message: agent_link_pb2.Execute) -> orders.ExecuteOrder:
        return replace(translate(message), grant_s=1e9)

    with patch.object(orders, "execute_from_proto", for_ever):
        yield


@contextlib.contextmanager
def no_content(history: History) -> Iterator[None]:
    """Do not compare what P computed with what D asks for."""
    with patch.object(Demand, "check_content", lambda *words: None):
        yield


@contextlib.contextmanager
def ids_used_again(history: History) -> Iterator[None]:
    """Tell an engine that asks for a handoff that has ended how it ended."""
    with patch.object(Handoff, "check_asked_before", lambda *words: None):
        yield


@contextlib.contextmanager
def pages_free_at_once(history: History) -> Iterator[None]:
    """Give D its pages back as soon as it gives its demand up."""
    cancel = Delivery.cancel

    def hasty(self: Delivery, msg: object = None) -> bool:
        cancelled = cancel(self, msg)
        if cancelled:
            self.free()
        return cancelled

    with patch.object(Delivery, "cancel", hasty):
        yield


@contextlib.contextmanager
def ends_of_one_side(history: History) -> Iterator[None]:
    """Let a broker ignore for one side what another broker told the other side."""
    history.lose_ends()
    with patch.object(Directory, "known_end", lambda *words: []):
        yield


@contextlib.contextmanager
def ends_of_any_attempt(history: History) -> Iterator[None]:
    """Count what one side was told for any handoff that the other side has open under that id."""
    # Where it matters: brokers die, and ids are used again.
    history.lose_ends()

    def of_the_engine(self: KnownWord, engine: EngineRecord | None, numbers: object) -> bool:
        return engine is not None and engine.key.engine_id == self.counterpart.engine_id

    often = patch("simulation_harness.history.USED_AGAIN", 1.0)
    with often, patch.object(KnownWord, "is_of", of_the_engine):
        yield


@contextlib.contextmanager
def two_states_at_once(history: History) -> Iterator[None]:
    """Let P publish a second state under an id that it has published whole, and fence it."""
    # Where it matters: chance alone brings this about once in some thousand histories.
    often = patch("simulation_harness.history.COMPUTED_AT_ONCE", 1.0)
    with often, patch.object(OpenHandoffs, "_is_another", lambda *words: False):
        yield


@contextlib.contextmanager
def two_states_of_any_client(history: History) -> Iterator[None]:
    """Publish two states under one id, as a client does that does not note what it published.

    The broker goes on with the state that it was told first.
    """
    with (
        two_states_at_once(history),
        patch.object(Directory, "publication_refused", lambda *words: []),
    ):
        yield


@contextlib.contextmanager
def leaving_at_once(history: History) -> Iterator[None]:
    """Let an engine drain without waiting for what is open."""
    # Where it matters: nothing else goes wrong.
    if history.faults is not None:
        history.faults.kinds = (history.faults.leave,)

    async def hasty(self: EngineSession, timeout_s: float | None = None) -> bool:
        return True

    with patch.object(EngineSession, "drain", hasty):
        yield


@contextlib.contextmanager
def wire_that_spoils(history: History) -> Iterator[None]:
    """Spoil some bytes of what is read, until all faults heal."""
    history.fabric.spoiled = 0.02
    history.unhindered.looks = False
    yield


@contextlib.contextmanager
def pages_free_after_one_reader(history: History) -> Iterator[None]:
    """Give P its pages back when the first of several readers has the state."""
    with patch.object(Deliveries, "served", property(lambda self: self.done > 0)):
        yield


@contextlib.contextmanager
def too_late_a_reader(history: History) -> Iterator[None]:
    """Tell a D that asks when all readers have the state how the publication ended: DONE."""

    def told(self: Readers, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
        return handoff

    with patch.object(Readers, "late", told):
        yield


@contextlib.contextmanager
def more_readers_than_places(history: History) -> Iterator[None]:
    """Let every D that asks read at once, however many readers P has named."""
    # Where it matters: more D's ask than P has named, and one of them reads for long.
    if history.faults is not None:
        history.faults.kinds = (history.faults.stall,)
    often = patch("simulation_harness.history.FOR_SEVERAL", 1.0)
    with often, patch.object(Deliveries, "has_place", True):
        yield


@contextlib.contextmanager
def offered_on(history: History) -> Iterator[None]:
    """Let a state that one holder publishes stay on offer to others."""
    with patch.object(Offering, "taken", lambda *words: None):
        yield


@contextlib.contextmanager
def offered_once(history: History) -> Iterator[None]:
    """Offer a state to nobody else when the first holder does not answer."""
    with patch.object(Offering, "tick", lambda *words: []):
        yield


@contextlib.contextmanager
def evicted_while_given(history: History) -> Iterator[None]:
    """Let an engine use pages again whose state it has published for an offer."""

    def hasty(self: KeptStates, kept: Kept) -> None:
        if kept.evicted and not kept.given:
            kept.given = True
            self._requests.pages.give(kept.ids)

    # Where it matters: much is evicted, soon after it was asked for.
    often = patch("simulation_harness.kept_prefixes.EVICTED", 1.0)
    with often, patch.object(KeptStates, "_give_if_free", hasty):
        yield


@contextlib.contextmanager
def no_revision_compared(history: History) -> Iterator[None]:
    """Give D the state of whichever weights P had."""
    with (
        patch("simulation_harness.history.REPLACED_OF", 1),
        patch("simulation_harness.history.audit", lambda _: []),
        patch.object(Handoff, "weights_differ", lambda *words: False),
    ):
        yield


@contextlib.contextmanager
def demands_of_weights_that_are_gone(history: History) -> Iterator[None]:
    """Let the demands of a D go on when its weights are replaced."""

    def forgetful(
        self: Directory, engine: EngineRecord, revision: str, now_s: float
    ) -> list[Action]:
        engine.revision = revision
        self.prefixes.forget(engine.key)
        return []

    with (
        patch("simulation_harness.history.REPLACED_OF", 1),
        patch.object(Directory, "revise", forgetful),
    ):
        yield


@contextlib.contextmanager
def pages_named_twice(history: History) -> Iterator[None]:
    """Let several open demands of an engine name the same pages."""

    def none_is_open(self: PagesInUse, handoff: Handoff, *words: object) -> None:
        handoff.writing = 0

    with (
        patch.object(PagesInUse, "take", none_is_open),
        patch.object(PagesInUse, "forget_held", lambda *words: None),
        patch("simulation_harness.history.audit", lambda directory: []),
    ):
        yield


def _only(history: History, *faults: str) -> None:
    """Let nothing else go wrong, as chance alone brings this fault about too seldom."""
    if history.faults is not None:
        history.faults.kinds = tuple(getattr(history.faults, name) for name in faults)


@contextlib.contextmanager
def ranks_replaced_in_a_read(history: History) -> Iterator[None]:
    """Let a rank of D that comes back as another process read on where the old one was."""
    _only(history, "replace_worker")
    slow = patch("stamped.requests.COMPUTED_IN_CHUNKS", 1.0)
    unread = patch.object(Handoff, "begun", False)
    with slow, unread, patch.object(Connections, "_end_words", lambda *words: []):
        yield


@contextlib.contextmanager
def words_of_a_dead_process(history: History) -> Iterator[None]:
    """Let what an engine had open go on in the next process of its incarnation."""
    _only(history, "restart_alike")
    with patch.object(Connections, "_end_words", lambda *words: []):
        yield


@contextlib.contextmanager
def given_up_and_published(history: History) -> Iterator[None]:
    """Let a session publish an id again that it has given up."""
    _only(history, "kill_broker")
    often = patch("simulation_harness.history.ATTEMPTED", 1.0)
    with often, patch.object(OpenHandoffs, "_use_up", lambda *words: None):
        yield


@contextlib.contextmanager
def fences_left_over(history: History) -> Iterator[None]:
    """Let any client publish such an id again; the broker keeps fences of unpublished ids."""
    often = patch("simulation_harness.history.ATTEMPTED", 1.0)
    with (
        often,
        patch.object(Directory, "_give_up_unpublished", lambda *words: []),
        patch.object(OpenHandoffs, "_use_up", lambda *words: None),
    ):
        yield


MUTATIONS: dict[str, Mutation] = {
    "incarnation": no_incarnation_in_names,
    "generation": no_generations,
    "quarantine": no_quarantine,
    "deadline": no_deadline_at_d,
    "drain": leaving_at_once,
    "wire": wire_that_spoils,
    "content": no_content,
    "reuse": ids_used_again,
    "cancelled": pages_free_at_once,
    "ends": ends_of_one_side,
    "attempt": ends_of_any_attempt,
    "twin": two_states_at_once,
    "twins": two_states_of_any_client,
    "served": pages_free_after_one_reader,
    "late": too_late_a_reader,
    "places": more_readers_than_places,
    "offered": offered_on,
    "next": offered_once,
    "pinned": evicted_while_given,
    "rank": ranks_replaced_in_a_read,
    "process": words_of_a_dead_process,
    "given-up": given_up_and_published,
    "fences": fences_left_over,
    "weights": no_revision_compared,
    "revised": demands_of_weights_that_are_gone,
    "twice": pages_named_twice,
    **EARLY,
    **SAMPLED,
    **MISPLACED,
    **OF_SEVERAL,
}
