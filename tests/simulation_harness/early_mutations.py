"""Promises of early reads taken out of the code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from restow.broker.core.common.actions import Action
from restow.broker.core.common.events import Failure
from restow.broker.core.common.limits import Limits
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.lease import Lease
from restow.broker.core.handoffs.publication import SourceSide
from restow.broker.core.ledger.ledger import Ledger
from simulation_harness.history import History

OFTEN = "stamped.requests.COMPUTED_IN_CHUNKS"


@contextlib.contextmanager
def fenced_before(history: History) -> Iterator[None]:
    """Let leading tokens be read as soon as their blocks are published."""

    def listed(self: SourceSide) -> int:
        if self.engine is None or self.publication.final:
            return 0
        per_token = [
            len(data) // 4 * self.engine.block_tokens[group]
            for group, data in self.publication.blocks.items()
            if self.engine.block_tokens[group]
        ]
        return min(per_token, default=0)

    with patch(OFTEN, 1.0), patch.object(SourceSide, "early_tokens", property(listed)):
        yield


@contextlib.contextmanager
def done_after_a_part(history: History) -> Iterator[None]:
    """Tell D DONE when it has read leading tokens."""
    with patch(OFTEN, 1.0), patch.object(Handoff, "part_tokens", property(lambda _: 0, _ignore)):
        yield


def _ignore(handoff: Handoff, tokens: int) -> None:
    """Ignore how many tokens were read."""


@contextlib.contextmanager
def lease_of_the_first_chunk(history: History) -> Iterator[None]:
    """End P's lease as its first chunk said, and let reads of later chunks go on."""
    renew, grant = Lease.renew, Lease.grant

    def once(self: Lease, lease_s: float, now_s: float) -> None:
        if not self.until_s:
            renew(self, lease_s, now_s)

    def longer(self: Lease, limits: Limits, now_s: float) -> Failure | None:
        until_s, self.until_s = self.until_s, self.until_s + limits.grant_s
        try:
            return grant(self, limits, now_s)
        finally:
            self.until_s = until_s

    often = patch(OFTEN, 1.0)
    with often, patch.object(Lease, "renew", once), patch.object(Lease, "grant", longer):
        yield


@contextlib.contextmanager
def used_though_taken_back(history: History) -> Iterator[None]:
    """Let D use what it is still reading when P takes the pages back."""

    def nothing(self: Ledger, whole: Handoff, now_s: float) -> list[Action]:
        return []

    often = patch(OFTEN, 1.0), patch("stamped.requests.PREEMPTED", 1.0)
    with often[0], often[1], patch.object(Ledger, "take_back", nothing):
        yield


EARLY = {
    "chunk": fenced_before,
    "part": done_after_a_part,
    "leased": lease_of_the_first_chunk,
    "preempted": used_though_taken_back,
}
