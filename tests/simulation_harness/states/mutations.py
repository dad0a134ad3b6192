"""Rules of commands about states taken out, each by its name: histories must find that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from restow.agents.store.commands import StateCommands
from restow.agents.store.kept import Kept
from restow.agents.store.requests import StateRequests
from restow.broker.client import Prefix
from restow.broker.client.engine.commands import StateOrder
from restow.broker.core.commands import Commands, Given
from restow.broker.core.common.actions import Action, SendCommand
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.state_commands import Answer, Outcome, Verb
from simulation_harness.states import commands
from simulation_harness.taken_out import Mutation, StandIn, instead, no_actions, nothing

_tick, _order, _answered = Commands.tick, Commands._order, Commands.answered


_end = Commands._end


def _end_as_if_new(self: Commands, given: Given, answer: Answer, now_s: float) -> list[Action]:
    return _end(self, given, replace(answer, left_s=given.command.for_s), now_s)


def _tick_patiently(self: Commands, now_s: float) -> list[Action]:
    for tenant in self.tenants.values():
        for given in tenant.open.values():
            given.until_s = max(given.until_s, now_s + 1.0)
    return _tick(self, now_s)


def _tick_and_release_nothing(self: Commands, now_s: float) -> list[Action]:
    return [one for one in _tick(self, now_s) if not isinstance(one, SendCommand)]


def _order_at_the_source(self: Commands, given: Given) -> list[Action]:
    given.asked = given.command.engine
    return _order(self, given)


def _answered_by_the_target(
    self: Commands, engine: EngineRecord, command_id: str, answer: Answer, now_s: float
) -> list[Action]:
    tenant = self.tenants.get(engine.key.tenant)
    given = tenant.open.get(command_id) if tenant is not None else None
    if given is not None and given.store is engine and engine.key == given.command.target:
        return self._end(given, answer, now_s)
    return _answered(self, engine, command_id, answer, now_s)


def _end_all(self: StateCommands) -> None:
    for name in list(self._pins):
        self._unpin(name)


def _evict_anything(self: StateCommands, prefix: Prefix) -> Answer:
    if self._holdings.evict(prefix):
        return Answer(Outcome.DONE, prefix.position_tokens)
    return Answer(Outcome.MISSING, 0, "NOT_HELD", "")


_release = StateCommands._release


def _release_all(self: StateCommands, order: StateOrder) -> Answer:
    return _release(self, replace(order, command_id=""))


_carry_out = StateCommands._carry_out


def _carry_out_again(self: StateCommands, order: StateOrder) -> None:
    self._answers.pop((order.command_id, order.verb), None)
    _carry_out(self, order)


def _fetch_in_words(self: StateRequests, prefix: Prefix, tell: Callable[[Answer], None]) -> None:
    self.hear(prefix)
    tell(Answer(Outcome.DONE, prefix.position_tokens))


def _count_a_use(self: Kept, prefix: Prefix) -> None:
    if (pinned := self.pin(prefix)) is not None:
        self._states.unpin(pinned.held)


def _without(*stand_ins: StandIn, only: Sequence[str] = ()) -> Mutation:
    """Return a mutation of histories that all have stores."""
    return instead((commands, "PLAYED", 1.0), *stand_ins, only=only)


def _strikes(name: str) -> tuple[StandIn, ...]:
    """Return what lets a fault of stores happen often, and no other one."""
    faults = property(lambda self: [getattr(self, name)])
    return ((commands.Commands, "faults", faults), (commands, "STRIKES", [8]))


_LATE_PINS: Sequence[StandIn] = (
    *_strikes("pause"),
    (commands, "HASTY", 0.6),
    (commands, "PIN_S", (10.0, 20.0)),
    (commands, "PLANS", [(Verb.PREFETCH, *4 * (Verb.PIN,))]),
)

MUTATIONS: dict[str, Mutation] = {
    # Let commands that no store answers stay open.
    "late command": _without((Commands, "tick", _tick_patiently)),
    # Let a pin last that was refused as late.
    "late pin": _without(*_LATE_PINS, (Commands, "tick", _tick_and_release_nothing)),
    # Release all pins of a state in place of the one that is refused as late.
    "late pins": _without(*_LATE_PINS, (StateCommands, "_release", _release_all)),
    # Have the source of a move drop the state before the target has it.
    "moved before": _without((Commands, "_order", _order_at_the_source)),
    # Let a move be done when the target has the state, and the source too.
    "moved twice": _without((Commands, "answered", _answered_by_the_target)),
    # Let another command take an id that is used.
    "command's id": _without((Given, "is_of", lambda *words: True)),
    # Do not repeat to a store that comes back what it has not answered.
    "command lost": _without(
        *_strikes("cut_from_broker"),
        *((commands, "HASTY", 0.0), (commands, "PATIENT", 1.0)),
        (Commands, "session_opened", no_actions),
    ),
    # Let a store evict what is pinned.
    "pin given up": _without((StateCommands, "end_late", _end_all)),
    # Let a store drop, by a command, what is pinned.
    "pinned evicted": _without((StateCommands, "_evict", _evict_anything)),
    # Let a pin last for ever.
    "pin for ever": _without((StateCommands, "end_late", nothing)),
    # Let a store carry a command out each time it is told.
    "command twice": _without(
        *((commands, "SAID_AGAIN", 1.0), (commands, "CONTRADICTED", 0.0)),
        (StateCommands, "_carry_out", _carry_out_again),
        only=["kill_broker"],
    ),
    # Count the time of a pin from when a broker hears of it.
    "pin anew": _without(
        *((commands, "SAID_AGAIN", 1.0), (commands, "CONTRADICTED", 0.0)),
        *((commands, "SAID_WITHIN_S", [20.0]), (commands, "PIN_S", (15.0, 25.0))),
        *((commands, "STRIKES", [0]), (Commands, "_end", _end_as_if_new)),
        only=["kill_broker"],
    ),
    # Let a store be done with a prefetch before the state is there.
    "fetched in words": _without((StateRequests, "fetch", _fetch_in_words)),
    # Let a state go with its last reader though a command wants it.
    "dropped while read": _without(
        *_strikes("forget"),
        (commands, "PLANS", [(Verb.PREFETCH, Verb.PIN, *4 * (Verb.PREFETCH,))]),
        (Kept, "use", _count_a_use),
    ),
}
