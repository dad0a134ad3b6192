"""Bounds of the directory: how long, how many; and the numbers of handoffs and probes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the directory. ``lease_s`` and ``timeout_s`` serve calls that name none.

    A grant ends ``lease_margin_s`` before its lease, and none is given that would be shorter than
    ``min_grant_s``. Reports of it are waited for ``settle_grace_s`` longer, because an agent whose
    read failed reports only when no byte can land any more (`AgentSettings.quarantine_s`, 6 s). A
    handoff whose agents are not all connected waits ``agent_wait_s`` for them, because after a
    restart of the broker all connect anew, and each pauses up to
    `client.connection.backoff.LONGEST_S`. As long, an agent whose stream broke may come back as if
    nothing had happened. Where D's session broke as well, D is dead: what its agent was reading is
    given up after ``agent_back_s``. A handoff that no D is there to ask for, or whose demand was
    refused, is kept for ``unasked_s``.
    An engine without session, agents and open handoffs is forgotten after ``engine_idle_s``; the
    same life may register again.
    Leading tokens are read before P has computed the whole where they make up ``early_bytes``.
    What reading costs between two hosts is measured on ``probe_bytes`` of staging; what did not
    answer within ``probe_s`` is not waited for, and measured again after ``probe_again_s`` at the
    earliest. For an engine that comes, plan and costs of ``pairs_ahead`` pairs with others of its
    pool are found out before a request needs them. What one tenant may hold of live handoffs,
    remembered ends and engines is bounded by ``tenant_max_...`` as well; None: only by the bound of
    all tenants. ``max_bytes`` are those of ids, metadata, layouts, plans and messages on their way;
    remembered ends are bounded by number. What engines hold of prefixes takes
    ``max_holdings_bytes`` beside that, of which a tenant has ``tenant_max_holdings_bytes`` at most;
    None: whatever others leave. An engine that is offered a demand for what it holds answers within
    ``offer_s``, or it goes to the next. With ``require_content`` nothing is published or asked for
    whose content is not named.
    """

    lease_s: float = 30.0
    timeout_s: float = 30.0
    max_lease_s: float = 600.0
    grant_s: float = 10.0
    min_grant_s: float = 0.05
    lease_margin_s: float = 0.1
    settle_grace_s: float = 7.0
    agent_wait_s: float = 10.0
    agent_back_s: float = 2.0
    unasked_s: float = 30.0
    engine_idle_s: float = 30.0
    early_bytes: int = 4 << 20
    max_live: int = 100_000
    max_ended: int = 10_000
    max_engines: int = 10_000
    max_pairs: int = 1024
    max_bytes: int = 4 << 30
    max_holdings_bytes: int = 1 << 30
    tenant_max_live: int | None = None
    tenant_max_ended: int | None = None
    tenant_max_engines: int | None = None
    tenant_max_bytes: int | None = None
    tenant_max_holdings_bytes: int | None = None
    probe_bytes: int = 32 << 20
    probe_s: float = 2.0
    probe_again_s: float = 60.0
    pairs_ahead: int = 16
    examine_bytes: int = 1 << 20
    examine_s: float = 40.0
    offer_s: float = 2.0
    require_content: bool = False

    def among_others(self) -> Limits:
        """The same for one of several brokers.

        An agent that lost it asks another broker, which has it wait up to
        `server.base.standing.LEADER_WAIT_S`, so an agent takes longer to be back.
        """
        return replace(self, agent_back_s=self.agent_back_s + 4.0)


PLACES = 12
"""Bits for what begins in one microsecond."""


class Numbering:
    """Gives numbers that grow, each of the moment that it was taken.

    Agents see them: counted one by one, they would tell a tenant how much others do.
    """

    def __init__(self, first_us: int) -> None:
        """Begin at ``first_us``, which keeps the numbers of several lives apart."""
        self._first_us = first_us
        self._last = 0

    def take(self, now_s: float) -> int:
        """A number greater than all before it; an int64 for 35 years."""
        self._last = max(self._last + 1, (self._first_us + int(now_s * 1e6)) << PLACES)
        return self._last
