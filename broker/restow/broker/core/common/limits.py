"""Limits of the directory, and the numbers that identify handoffs and probes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the directory.

    Time. ``lease_s`` and ``timeout_s`` are defaults for calls that name none. A grant ends
    ``lease_margin_s`` before the lease; a grant shorter than ``min_grant_s`` is not given. The
    broker waits for reports ``settle_grace_s`` longer than the grant, because an agent whose read
    failed reports only when no byte can land any more (`AgentSettings.quarantine_s`, 6 s). A
    handoff waits ``agent_wait_s`` for missing agents, because all agents reconnect after a restart
    of the broker, and each pauses up to `client.connection.brokers.LONGEST_S`; an agent whose
    stream broke may also come back within that time and keep its work. If D's session broke as
    well, D is presumed dead, and its agents' reads are given up after ``agent_back_s``. A handoff
    that no D can ask for, or whose demand was refused, is kept for ``unasked_s``. An engine without
    session, agents and open handoffs is forgotten after ``engine_idle_s``; the same incarnation may
    register again. An engine must answer an offer within ``offer_s``; after that the next holder
    gets the offer.

    Reading. Leading tokens are read before P has computed the whole state if they have at least
    ``early_bytes``. The cost of reading between two hosts is measured on ``probe_bytes`` of
    staging; a probe times out after ``probe_s`` and is repeated after ``probe_again_s`` at the
    earliest. When an engine registers, the plans and costs of ``pairs_ahead`` pairs with others of
    its pool are prepared before a request needs them.

    Memory. ``max_bytes`` bounds ids, metadata, layouts, plans and queued messages; ended handoffs
    are bounded by number (``max_ended``). Announced holdings have ``max_holdings_bytes`` of their
    own. ``tenant_max_...`` bounds what a single tenant holds of live handoffs, ended handoffs,
    engines, bytes and holdings; None means that only the bound for all tenants applies.

    With ``require_content``, publications and demands must name their content.
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
        """Return the limits for a broker that runs beside other brokers.

        A client that loses its broker asks another broker, which makes it wait up to
        `server.base.standing.LEADER_WAIT_S`. An agent therefore takes longer to come back.
        """
        return replace(self, agent_back_s=self.agent_back_s + 4.0)


PLACES = 12
"""Bits for numbers that are taken in the same microsecond."""


class Numbering:
    """Issues rising numbers that are derived from the time of issue.

    Agents see the numbers; consecutive numbers would tell a tenant how much other tenants do.
    """

    def __init__(self, first_us: int) -> None:
        """Begin at ``first_us``, the time of the start, which keeps broker lives apart."""
        self._first_us = first_us
        self._last = 0

    def take(self, now_s: float) -> int:
        """Return a number greater than all numbers before; it fits into an int64 for 35 years."""
        self._last = max(self._last + 1, (self._first_us + int(now_s * 1e6)) << PLACES)
        return self._last
