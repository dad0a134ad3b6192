"""Rules of several brokers taken out, each by its name: histories must find that they are missing.

Where another rule covers one, only both together are found.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from restow.agents.link.broker_link import Link
from restow.broker.client.connection.brokers import Epochs
from restow.broker.client.connection.kept_stream import KeptStream
from restow.broker.core.common.limits import Numbering
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.registry.leadership import Leadership
from restow.broker.server.base.one_of_several import OneOfSeveral
from simulation_harness.several.faults import FleetFaults
from simulation_harness.taken_out import Mutation, both, instead, nothing

if TYPE_CHECKING:
    from simulation_harness.history import History


def _several(history: History) -> None:
    history.be_several()


def _restore_and_kill(history: History) -> None:
    history.be_several()
    if history.faults is not None:
        fleet = FleetFaults(history)
        history.faults.kinds = (fleet.restore_etcd, fleet.kill_leader)


def _cut_off_and_kill_the_next(history: History) -> None:
    """Let clients leave a leader that is cut off, and the next one die; look only at clients."""
    history.be_several()
    if history.brokers.said is not None:
        history.brokers.said.looks = False
    if history.faults is not None:
        history.faults.kinds = (FleetFaults(history).cut_off_and_kill_the_next,)
        history.unhindered.looks = False


def _may_act_to_the_end(self: Leadership, now_s: float) -> bool:
    return bool(self.epoch) and self.lease is not None and now_s < self.lease.end_s


_look = OneOfSeveral._look_at_it


def _look_and_restart(self: OneOfSeveral) -> None:
    ledger = self._hub.directory.ledger
    if self.leadership.epoch and not self.term and not ledger.by_number:
        ledger.numbering._last = 0
    _look(self)


def _count(self: Numbering, now_s: float) -> int:
    self._last += 1
    return self._last


class _Kept(deque[Any]):
    """It is not emptied."""

    def clear(self) -> None:
        pass


_begin, _send = KeptStream.__init__, KeptStream.send


def _begin_keeping(self: KeptStream[Any, Any, Any], *given: Any) -> None:
    _begin(self, *given)
    if isinstance(self, Link):
        self._outbox = _Kept()


def _send_later(self: KeptStream[Any, Any, Any], message: Any) -> bool:
    if isinstance(self, Link):
        self._outbox.append(message)
        self._wake.set()
        return True
    return _send(self, message)


_DOUBTLESS = (OneOfSeveral, "is_sure", lambda self: True)

MUTATIONS: dict[str, Mutation] = {
    # Let agents and sessions take what is said in an epoch that is over; and let a broker in doubt
    # go on leading.
    "epochs": instead(
        (Epochs, "take", nothing),
        _DOUBTLESS,
        (Leadership, "tick", nothing),
        first=_cut_off_and_kill_the_next,
    ),
    # Let a broker act until the very end of its lease, by its own clock.
    "margin": instead((Leadership, "may_act", _may_act_to_the_end), first=_several),
    # Let a leader keep an epoch below one that clients know: they can't take its word.
    "named": instead((Leadership, "named", nothing), first=_restore_and_kill),
    # Count handoffs from one in every epoch; and let an agent report on its next stream what it
    # could not report on the last one.
    "numbers": both(
        instead(
            (OneOfSeveral, "_look_at_it", _look_and_restart),
            (Numbering, "take", _count),
            first=_several,
        ),
        instead((KeptStream, "__init__", _begin_keeping), (KeptStream, "send", _send_later)),
    ),
    # Let a broker go on though its lease may have ended.
    "doubt": instead(_DOUBTLESS, first=_several),
    # Let a broker that no longer leads end its handoffs, and tell its clients.
    "failures": instead((Ledger, "forget", nothing), first=_several),
}
