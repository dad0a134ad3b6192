"""What brokers say and clients take: only one may grant, end and free at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from restow.broker.client.connection.brokers import Epochs
from restow.broker.registry.registry import Leader
from restow.v1 import agent_link_pb2, broker_pb2
from simulation_harness.virtual_loop import Process
from stamped.stamps import Violation

if TYPE_CHECKING:
    from simulation_harness.several.brokers import Life

GRANTS = ("stage", "execute")
FREES = ("unstage", "unfence")


class Said:
    """Looks at each batch of orders and events of brokers that are several."""

    def __init__(
        self,
        lives: Callable[[], Iterable[Life]],
        found: Callable[[BaseException], None],
    ) -> None:
        self._lives, self._found = lives, found
        self.looks = True
        """Whether what leaves brokers is looked at, beside what clients take."""
        self._highest = 0
        """The last epoch in which anything was granted, ended or freed."""
        self.acts = 0

    def look(self, process: Process, batch: Any) -> None:
        """Look at a batch that leaves a broker."""
        if not self.looks or not acts(batch):
            return
        self.acts += 1
        if batch.epoch < self._highest:
            words = f"{process.name} acts in epoch {batch.epoch}, after epoch {self._highest}"
            self._found(Violation(words))
        self._highest = max(self._highest, batch.epoch)
        those = [(life.process.name, epoch) for life in self._lives() if (epoch := life.may_act())]
        if those != [(process.name, batch.epoch)]:
            words = f"{process.name} acts in epoch {batch.epoch}, and those that may are {those}"
            self._found(Violation(words))

    def begins(self, leader: Leader) -> None:
        """Check that no other broker believes that it leads when a broker begins to lead."""
        others = [
            (life.process.name, epoch)
            for life in self._lives()
            if (epoch := life.may_act()) and life.address != leader.address
        ]
        if self.looks and others:
            words = f"{leader.address} leads in epoch {leader.epoch}, and {others} may act"
            self._found(Violation(words))

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Look at what agents and sessions take, too: none of them goes back to an epoch."""
        take, highest = Epochs.take, WeakKeyDictionary[Epochs, int]()

        def look(epochs: Epochs, epoch: int) -> None:
            take(epochs, epoch)
            before = highest.get(epochs, 0)
            highest[epochs] = max(epoch, before)
            if epoch < before:
                words = f"a client takes what is said in epoch {epoch} after epoch {before}"
                self._found(Violation(words))

        with patch.object(Epochs, "take", look):
            yield


def acts(batch: Any) -> bool:
    """Return whether a batch grants, ends or frees anything."""
    match batch:
        case agent_link_pb2.ConnectResponse():
            return any(order.WhichOneof("body") in (*GRANTS, *FREES) for order in batch.orders)
        case broker_pb2.SessionResponse():
            return any(event.WhichOneof("body") == "ended" for event in batch.events)
    return False
