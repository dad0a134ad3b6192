"""What reading costs between two hosts: their agents measure it before it is first needed.

Both say what copying costs, and the destination's what reading the source's memory does. A pair
that can't be measured, or not in time, is planned with the costs of the broker's settings. Agents
measure for their own tenant: what another one's say of a host counts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from restow.broker.core.actions import Action, HostPair
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Probed
from restow.broker.core.handoffs.handoff import MAX_REASON
from restow.broker.core.ledger.statistics import Durations
from restow.broker.core.limits import Limits
from restow.broker.core.numbering import Numbering
from restow.broker.core.pair import PairPlan
from restow.broker.core.probing.probes import Probe, ProbeEnd, Probes
from restow.broker.errors import CostsInvalidError
from restow.broker.planner import CostModel


@dataclass(slots=True, eq=False)
class HostCosts:
    """What is known of a pair of hosts."""

    costs: CostModel | None = None
    failure: str = ""
    again_s: float = 0.0
    """When a failed measurement may be repeated."""


class Probing:
    """The costs of all pairs of hosts. Pure, like the directory that it serves."""

    def __init__(self, limits: Limits, enabled: bool, numbering: Numbering) -> None:
        """Know nothing; not ``enabled``: never ask. ``numbering`` is that of all probes."""
        self.known: OrderedDict[HostPair, HostCosts] = OrderedDict()
        self._limits = limits
        self._enabled = enabled
        self.measuring = Durations()
        """How long measurements took, failed ones too."""
        self._probes = Probes(numbering)
        self._by_hosts: dict[HostPair, tuple[Probe, set[int]]] = {}
        """The measurement of a pair that is under way, and the handoffs that wait for it."""

    def hosts(self, source: EngineRecord, destination: EngineRecord) -> HostPair | None:
        """The hosts between which costs of two engines are measured; those of their first ranks."""
        return _hosts(source, destination) if self._enabled else None

    def costs(self, source: EngineRecord, destination: EngineRecord) -> HostPair | None:
        """The hosts of two engines whose costs are known."""
        if not self.known:
            return None
        hosts = _hosts(source, destination)
        known = None if hosts is None else self.known.get(hosts)
        return hosts if known is not None and known.costs is not None else None

    def wait(
        self,
        handoff: int,
        source: EngineRecord,
        destination: EngineRecord,
        plan: PairPlan,
        now_s: float,
    ) -> list[Action] | None:
        """Have a handoff wait until costs are known; None: there is nothing to wait for."""
        actions = self.measure(source, destination, plan, now_s)
        hosts = self.hosts(source, destination)
        if actions is not None and hosts is not None:
            self._by_hosts[hosts][1].add(handoff)
        return actions

    def measure(
        self, source: EngineRecord, destination: EngineRecord, plan: PairPlan, now_s: float
    ) -> list[Action] | None:
        """Have costs measured that are not known, unless that is under way; None: they are not."""
        hosts = self.hosts(source, destination)
        if hosts is None:
            return None
        first, second = _first(source), _first(destination)
        # A measurement hands the right to read over: nobody gets it who would not get it anyway.
        if first.key.rank not in plan.sources.get(second.key.rank, ()):
            return None
        known = self.known.get(hosts)
        if known is not None and (known.costs is not None or now_s < known.again_s):
            return None
        if hosts in self._by_hosts:
            return []
        size_bytes = min(self._limits.probe_bytes, first.staging_bytes, second.staging_bytes)
        if not size_bytes:
            return None
        until_s = now_s + self._limits.probe_s
        probe, actions = self._probes.begin(first, second, size_bytes, now_s, until_s)
        self._by_hosts[hosts] = probe, set()
        return actions

    def failure(self, source: EngineRecord, destination: EngineRecord) -> str:
        """Why the costs of two engines could not be measured; nothing if they were."""
        hosts = self.hosts(source, destination)
        known = None if hosts is None else self.known.get(hosts)
        return "" if known is None else known.failure

    def awaited_by(self, handoff: int) -> bool:
        """Whether a handoff waits for a measurement that is under way."""
        return any(handoff in waiting for _, waiting in self._by_hosts.values())

    def answered(
        self, agent: AgentRecord, answer: Probed, now_s: float
    ) -> tuple[list[Action], set[int]]:
        """An agent has measured: what follows, and the handoffs that wait no more."""
        actions, end = self._probes.answered(agent, answer, now_s)
        return actions, set() if end is None else self._learn(end, now_s)

    def tick(self, now_s: float) -> tuple[list[Action], set[int]]:
        """Give up what takes too long, and what has lost an agent."""
        actions, ends = self._probes.tick(now_s)
        return actions, set().union(*(self._learn(end, now_s) for end in ends))

    def _learn(self, end: ProbeEnd, now_s: float) -> set[int]:
        """Keep the costs, or that there are none; the handoffs that waited for them."""
        hosts = next(one for one, (probe, _) in self._by_hosts.items() if probe is end.probe)
        _, waiting = self._by_hosts.pop(hosts)
        self.measuring.add(now_s - end.probe.begun_s)
        outcome = _outcome(end)
        outcome.again_s = now_s + self._limits.probe_again_s
        self.known[hosts] = outcome
        if len(self.known) > self._limits.max_pairs:
            self.known.popitem(last=False)
        return waiting


def _outcome(end: ProbeEnd) -> HostCosts:
    read, held = end.answer, end.probe.held
    if read is None or held is None:
        return HostCosts(failure=end.reason[:MAX_REASON])
    if read.reading is None:
        return HostCosts(failure="ARGUMENT_INVALID")
    stage_s = max(end.probe.held_s - end.probe.begun_s - held.elapsed_us / 1e6, 0.0)
    try:
        costs = CostModel.measured(held.copying, read.copying, read.reading, stage_s)
    except CostsInvalidError as error:
        return HostCosts(failure=error.message)
    return HostCosts(costs)


def _first(engine: EngineRecord) -> AgentRecord:
    return engine.agents[min(engine.agents)]


def _hosts(source: EngineRecord, destination: EngineRecord) -> HostPair | None:
    if not (source.agents and destination.agents):
        return None
    source_host, destination_host = _first(source).host, _first(destination).host
    if not (source_host and destination_host):
        return None
    return HostPair(source.key.tenant, source_host, destination_host)
