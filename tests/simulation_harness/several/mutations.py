"""Rules of several brokers taken out, each by its name: histories must find that they are missing.

Where another rule covers one, only both together are found: ``BESIDE`` says which.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from restow.agents.link.broker_link import Link
from restow.broker.client.connection.brokers import Epochs
from restow.broker.client.connection.kept_stream import KeptStream
from restow.broker.core.common.limits import Numbering
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.registry.leadership import Leadership
from restow.broker.server.base.one_of_several import OneOfSeveral
from simulation_harness.several.faults import FleetFaults

if TYPE_CHECKING:
    from simulation_harness.history import History

Rule = Callable[["History"], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def lower_epochs(history: History) -> Iterator[None]:
    """Let agents and sessions take what is said in an epoch that is over."""
    history.be_several()
    with patch.object(Epochs, "take", lambda *words: None):
        yield


@contextlib.contextmanager
def no_margin(history: History) -> Iterator[None]:
    """Let a broker act until the very end of its lease, by its own clock."""
    history.be_several()

    def may_act(self: Leadership, now_s: float) -> bool:
        return bool(self.epoch) and self.lease is not None and now_s < self.lease.end_s

    with patch.object(Leadership, "may_act", may_act):
        yield


@contextlib.contextmanager
def lower_epochs_led(history: History) -> Iterator[None]:
    """Let a leader keep an epoch below one that clients know: they can't take its word."""
    history.be_several()
    if history.faults is not None:
        fleet = FleetFaults(history)
        history.faults.kinds = (fleet.restore_etcd, fleet.kill_leader)
    with patch.object(Leadership, "named", lambda self, epoch: None):
        yield


@contextlib.contextmanager
def numbers_restart(history: History) -> Iterator[None]:
    """Count handoffs from one in every epoch."""
    history.be_several()
    look = OneOfSeveral._look_at_it

    def restart(self: OneOfSeveral) -> None:
        ledger = self._hub.directory.ledger
        if self.leadership.epoch and not self.term and not ledger.by_number:
            ledger.numbering._last = 0
        look(self)

    def count(self: Numbering, now_s: float) -> int:
        self._last += 1
        return self._last

    with patch.object(OneOfSeveral, "_look_at_it", restart), patch.object(Numbering, "take", count):
        yield


@contextlib.contextmanager
def no_doubt(history: History) -> Iterator[None]:
    """Let a broker go on though its lease may have ended."""
    history.be_several()
    with patch.object(OneOfSeveral, "is_sure", lambda self: True):
        yield


@contextlib.contextmanager
def lost_handoffs_fail(history: History) -> Iterator[None]:
    """Let a broker that no longer leads end its handoffs, and tell its clients."""
    history.be_several()
    with patch.object(Ledger, "forget", lambda *words: None):
        yield


@contextlib.contextmanager
def clients_alone(history: History) -> Iterator[None]:
    """Let a broker in doubt go on leading, and look only at what clients take."""
    with no_doubt(history), patch.object(Leadership, "tick", lambda *when: None):
        if history.brokers.said is not None:
            history.brokers.said.looks = False
        # Where it matters: clients leave a leader that is cut off, and the next one dies.
        if history.faults is not None:
            history.faults.kinds = (FleetFaults(history).cut_off_and_kill_the_next,)
            history.unhindered.looks = False
        yield


class _Kept(deque[Any]):
    """It is not emptied."""

    def clear(self) -> None:
        pass


@contextlib.contextmanager
def reports_outlive_streams(history: History) -> Iterator[None]:
    """Let an agent report on its next stream what it could not report on the last one."""
    begin, sends = KeptStream.__init__, KeptStream.send

    def keeping(self: KeptStream[Any, Any, Any], *given: Any) -> None:
        begin(self, *given)
        if isinstance(self, Link):
            self._outbox = _Kept()

    def send(self: KeptStream[Any, Any, Any], message: Any) -> bool:
        if isinstance(self, Link):
            self._outbox.append(message)
            self._wake.set()
            return True
        return sends(self, message)

    with patch.object(KeptStream, "__init__", keeping), patch.object(KeptStream, "send", send):
        yield


def both(one: Rule, beside: Rule) -> Rule:
    """Return a rule that takes two rules out together."""

    @contextlib.contextmanager
    def neither(history: History) -> Iterator[None]:
        with one(history), beside(history):
            yield

    return neither


ALONE: dict[str, Rule] = {
    "epochs": lower_epochs,
    "margin": no_margin,
    "named": lower_epochs_led,
    "numbers": numbers_restart,
    "doubt": no_doubt,
    "failures": lost_handoffs_fail,
}
BESIDE: dict[str, Rule] = {
    "epochs": clients_alone,
    "numbers": reports_outlive_streams,
}
MUTATIONS: dict[str, Rule] = {
    name: both(rule, BESIDE[name]) if name in BESIDE else rule for name, rule in ALONE.items()
}
