"""A `Tally` counts what became of an interval's handoffs, for vLLM's log and Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from restow.agents.engines.common.handoff_ends import HandoffEnd
from restow.agents.engines.vllm.interval import nothing
from restow.broker.reasons import REASONS

OTHER = "OTHER"
"""In place of a reason that is not in the book: agents of other versions give them."""


@dataclass(slots=True)
class Tally:
    """Counts since the last `take`, as plain values that travel between vLLM's processes."""

    transfers: list[list[float]] = field(default_factory=list)
    """Bytes and seconds of each state received."""
    failures: Counter[str] = field(default_factory=Counter)
    """By side and reason, such as ``decode:NOT_PUBLISHED``."""
    waits: list[float] = field(default_factory=list)
    """Seconds from D's wish to the beginning of the read."""
    external_tokens: int = 0
    states_sent: int = 0
    """States of P that D has read."""
    present: dict[str, int] = field(default_factory=dict)
    """What there is at the moment, by name."""
    _told: dict[str, int] = field(default_factory=dict)
    """What there was at the last `take`."""

    def received(self, end: HandoffEnd) -> None:
        """Count D's wait, which has ended."""
        if end.reason:
            self.failures[f"decode:{_known(end.reason)}"] += 1
            return
        self.transfers.append([end.bytes, end.transfer_us / 1e6])
        self.waits.append(max(end.waited_s - end.transfer_us / 1e6, 0.0))
        self.external_tokens += end.tokens

    def sent(self, end: HandoffEnd) -> None:
        """Count P's part, whose pages are free."""
        if end.failed:
            self.failures[f"prefill:{_known(end.reason)}"] += 1
        elif not end.reason:
            self.states_sent += 1

    def refused(self, kv_role: str, reason: str) -> None:
        """Count a request that said something that can't be meant."""
        self.failures[f"{'prefill' if kv_role == 'kv_producer' else 'decode'}:{reason}"] += 1

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        happened = self.transfers or self.failures or self.states_sent
        return not happened and self.present == self._told

    def take(self) -> dict[str, Any]:
        """Return everything so far, and begin anew."""
        data = nothing() | {
            "transfers": self.transfers,
            "failures": dict(self.failures),
            "waits": self.waits,
            "external_tokens": self.external_tokens,
            "states_sent": self.states_sent,
            "present": dict(self.present),
        }
        self._told = dict(self.present)
        self.transfers, self.failures, self.waits, self.external_tokens = [], Counter(), [], 0
        self.states_sent = 0
        return data


def _known(reason: str) -> str:
    return reason if reason in REASONS else OTHER
