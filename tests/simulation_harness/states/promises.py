"""What must hold of commands about states, as stores and brokers carry them out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from restow.agents.store.room import PieceKey
from restow.broker.client import Prefix
from restow.broker.client.engine.commands import CommandStatus, StateOrder
from restow.broker.core.commands import KEPT_S, Given
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.server.gate.callers import DEFAULT_TENANT
from restow.broker.state_commands import Answer, Outcome, Verb
from stamped.stamps import Violation

if TYPE_CHECKING:
    from restow.broker.server.base.hub import Hub
    from simulation_harness.history import History
    from simulation_harness.several.brokers import Life
    from simulation_harness.states.store import Store

LOOK_S = 0.5
GRACE_S = 1.0
"""After which a command that is late must have ended."""
REACHED_S = 6.0
"""Within which all arrives on a stream that is not cut."""
BY_BROKER = {
    "COMMAND_LATE",
    "ENGINE_DRAINING",
    "ENGINE_LOST",
    "ENGINE_UNKNOWN",
    "NO_STORE",
    "SAME_STORE",
}
"""Reasons for which a broker refuses a command by itself."""
MOMENT_S = 1e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """A command as it is given."""

    command_id: str
    verb: Verb
    prefix: Prefix
    store: str
    timeout_s: float
    for_s: float = 0.0
    to_store: str = ""

    def steps(self) -> Iterator[tuple[Verb, str]]:
        """Yield what stores do for it, in order, and which."""
        if self.verb is Verb.MOVE:
            yield Verb.PREFETCH, self.to_store
            yield Verb.EVICT, self.store
        else:
            yield self.verb, self.store


@dataclass(eq=False, slots=True)
class Promised:
    """A pin that a store has confirmed."""

    names: Collection[Prefix]
    pieces: Collection[PieceKey]
    until_s: float
    released: bool = False

    def release(self, now_s: float) -> None:
        """Take note that it is over."""
        self.until_s, self.released = min(self.until_s, now_s), True


class Promises:
    """Looks at what stores hear, say and hold, and at what brokers know."""

    def __init__(self, history: History, stores: Mapping[str, list[Store]]) -> None:
        """Begin; ``stores`` are the lives of each store."""
        self.asked: dict[str, Asked] = {}
        """By command."""
        self._history, self._stores = history, stores
        self._heard: set[tuple[Store, str, Verb]] = set()
        self._answers: dict[tuple[Store, str, Verb], Answer] = {}
        self._pins: dict[Store, dict[str, Promised]] = defaultdict(dict)
        self._fetched: dict[Store, dict[Prefix, tuple[int, int]]] = defaultdict(dict)
        """How many states a store had evicted or forgotten when a command had brought one."""
        self._forgets: dict[Store, int] = defaultdict(int)
        self._open_s: dict[tuple[Life, int, str], float] = {}
        """Since when a command is open at a broker that acts."""
        self._ended_s: dict[tuple[Life, str], float] = {}
        """When a broker was seen to know of a pin first."""
        self._clear_s: dict[tuple[Life, str], float] = {}
        """Since when nothing lies between a broker and a store."""

    @property
    def _now_s(self) -> float:
        return self._history.loop.time()

    def _broken(self, words: str) -> None:
        self._history.found.append(Violation(words))

    # -- what stores hear and say -----------------------------------------------------------------

    def ordered(self, store: Store, order: StateOrder) -> None:
        """Take note of what a store does for the first time."""
        key = store, order.command_id, order.verb
        if key in self._heard:
            return
        self._heard.add(key)
        asked = self.asked[order.command_id]
        if order.verb is Verb.RELEASE:
            for name, pin in self._pins[store].items():
                # A pin that came too late is released by its own command's id.
                its = (
                    name == order.command_id
                    if asked.verb is Verb.PIN
                    else order.prefix in pin.names
                )
                if its:
                    pin.release(self._now_s)
        if order.verb is Verb.EVICT:
            self._fetched[store].pop(order.prefix, None)
            if asked.verb is Verb.MOVE and not self._said(asked, Verb.PREFETCH, Outcome.DONE):
                self._broken(f"{store.name} drops a state before {asked.to_store} has it")

    def answered(self, store: Store, order: StateOrder, answer: Answer) -> None:
        """Look at what a store answers: the same each time."""
        key = store, order.command_id, order.verb
        if key in self._answers:
            if self._answers[key] != replace(answer, left_s=self._answers[key].left_s):
                self._broken(f"{store.name} answers {self._answers[key]} and then {answer}")
            return
        self._answers[key] = answer
        if answer.outcome not in (Outcome.DONE, Outcome.CLIPPED):
            return
        prefix = order.prefix
        if order.verb is Verb.PIN:
            if answer.tokens < prefix.position_tokens:
                prefix = prefix.chain.prefix(answer.tokens)
            pieces, until_s = store.pieces(prefix), self._now_s + order.for_s
            names = (order.prefix, prefix)
            self._pins[store][order.command_id] = Promised(names, frozenset(pieces), until_s)
        elif order.verb is Verb.PREFETCH:
            self._fetched[store][prefix] = store.holdings.evictions, self._forgets[store]
        elif order.verb is Verb.EVICT:
            if store.is_listed(prefix):
                self._broken(f"{store.name} has evicted a state, and keeps it")
            if any(prefix in pin.names for pin in self._lasting(store)):
                self._broken(f"{store.name} has evicted a state that is pinned")
        if order.verb in (Verb.PREFETCH, Verb.PIN) and not store.has_told(prefix):
            self._broken(f"{store.name} is done with a {order.verb}, and has not the state")

    def forgets(self, store: Store) -> None:
        """Take note that a store forgets the states of some weights."""
        self._forgets[store] += 1

    def gone(self, store: Store, pieces: set[PieceKey]) -> None:
        """Look at what a store holds no more: nothing that is pinned or that nobody evicted."""
        if any(not pieces.isdisjoint(pin.pieces) for pin in self._lasting(store)):
            self._broken(f"{store.name} evicts a state that is pinned")
        fetched, now = self._fetched[store], (store.holdings.evictions, self._forgets[store])
        for prefix, before in list(fetched.items()):
            if not pieces.isdisjoint(store.pieces(prefix)):
                del fetched[prefix]
                if before == now:
                    self._broken(f"{store.name} loses a state that a command has brought")

    def _lasting(self, store: Store) -> Iterator[Promised]:
        return (pin for pin in self._pins[store].values() if pin.until_s > self._now_s + MOMENT_S)

    def _said(self, asked: Asked, verb: Verb, outcome: Outcome) -> bool:
        """Return whether a life of the store that was to do it has said so."""
        name = dict(asked.steps())[verb]
        return any(
            (answer := self._answers.get((life, asked.command_id, verb))) is not None
            and answer.outcome is outcome
            for life in self._stores[name]
        )

    # -- what callers hear ------------------------------------------------------------------------

    def ended(self, asked: Asked, status: CommandStatus) -> None:
        """Look at how a command has ended: as a store said, or for a reason of the broker."""
        if status.outcome is Outcome.REFUSED and status.reason in BY_BROKER:
            if status.reason == "SAME_STORE" and asked.store != asked.to_store:
                self._broken(f"a {asked.verb} of {asked.store} is refused for {status.reason}")
            return
        said = [self._said(asked, verb, status.outcome) for verb, _ in asked.steps()]
        if not (all(said) if status.outcome is Outcome.DONE else any(said)):
            self._broken(f"a {asked.verb} is {status.outcome}, and no store has said so")

    # -- what brokers and stores know -------------------------------------------------------------

    def look(self) -> None:
        """Look at all stores and brokers, again and again."""
        for lives in self._stores.values():
            self._look_at_store(lives[-1])
        for life in self._history.brokers.running:
            acts = not life.process.paused and (life.fleet is None or bool(life.may_act()))
            if acts and life.hub is not None:
                self._look_at_broker(life, life.hub)
            else:
                self._open_s = {key: at_s for key, at_s in self._open_s.items() if key[0] != life}
                self._clear_s = {key: at_s for key, at_s in self._clear_s.items() if key[0] != life}
        self._history.loop.call_later(LOOK_S, self.look, context=Context())

    def _look_at_store(self, store: Store) -> None:
        if store.agent is None or not store.process.alive:
            return
        pins = store.commands._pins
        lasting = (name for name, pin in self._pins[store].items() if pin.until_s > self._now_s)
        if gone := [name for name in lasting if name not in pins]:
            self._broken(f"{store.name} has given up the pins {gone}")
        for name, pin in pins.items():
            promised = self._pins[store].get(name)
            if promised is None or promised.released:
                self._broken(f"{store.name} keeps a pin that was released")
            elif pin.until_s > promised.until_s + MOMENT_S:
                self._broken(f"{store.name} keeps a pin for longer than it was asked to")

    def _look_at_broker(self, life: Life, hub: Hub) -> None:
        for name, lives in self._stores.items():
            record = hub.directory.members.engines.get(EngineKey(DEFAULT_TENANT, name))
            if record is None or not self._reaches(life, record, lives[-1]):
                self._clear_s.pop((life, name), None)
            elif (life, name) not in self._clear_s:
                self._clear_s[life, name] = self._now_s
        for tenant in hub.directory.commands.tenants.values():
            for name, given in tenant.by_id.items():
                key = life, life.process.pauses, name
                if given.open:
                    open_s = self._now_s - self._open_s.setdefault(key, self._now_s)
                    if open_s > self.asked[name].timeout_s + GRACE_S:
                        self._broken(f"a {given.command.verb} is open after {open_s:g} s")
                elif given.answer.reason == "COMMAND_LATE":
                    self._look_at_late(life, given)
                elif given.left_s(self._now_s):
                    self._look_at_pin(life, given)

    def _reaches(self, life: Life, record: EngineRecord, store: Store) -> bool:
        """Return whether nothing lies between a broker and a store."""
        cut = self._history.network.is_cut(life.process.host, store.process.host)
        there = record.has_session and record.incarnation == store.life
        return there and not cut and store.process.alive and not store.process.paused

    def _look_at_pin(self, life: Life, given: Given) -> None:
        """Check how long a broker says that a pin lasts, if the store's answer was not held up.

        A release may have been carried out without the broker's knowledge, if it was late.
        """
        store, name = self._stores[given.asked.engine_id][-1], given.command.command_id
        ended_s = self._ended_s.setdefault((life, name), self._now_s)
        opened_s = given.store.session_s if given.store is not None else 0.0
        since_s = max(opened_s + 2 * LOOK_S, ended_s - REACHED_S)
        if self._clear_s.get((life, store.name), self._now_s) > since_s:
            return
        promised = self._pins[store].get(name)
        if promised is None:
            self._broken(f"{life.process.name} tells of a pin that {store.name} never had")
        elif not promised.released and given.until_s > promised.until_s + REACHED_S:
            over_s = given.until_s - promised.until_s
            self._broken(f"{life.process.name} tells of a pin {over_s:g} s longer than it lasts")

    def _look_at_late(self, life: Life, given: Given) -> None:
        """Check that a store has heard of a late command, and that a late pin is over.

        If its stream has been opened again since, the store may not know the command.
        """
        record, ended_s = given.store, given.forget_s - KEPT_S
        store = self._stores[given.asked.engine_id][-1]
        clear_s = self._clear_s.get((life, store.name), self._now_s)
        if record is None or record.gone or self._now_s - max(clear_s, ended_s) < REACHED_S:
            return
        asked = self.asked[given.command.command_id]
        verb = next(verb for verb, name in asked.steps() if name == store.name)
        heard = (store, asked.command_id, verb) in self._heard
        if not heard and record.session_s < ended_s:
            self._broken(f"{store.name} was not told of a {asked.verb} that is late")
        if asked.verb is Verb.PIN and asked.command_id in store.commands._pins:
            self._broken(f"{store.name} keeps a pin that is refused as late")
