"""What reading costs between two hosts: measured by their agents before it is first needed.

    source's agent:       Probe --measures copying, holds memory--> Probed
    destination's agent:            Probe --measures copying, and reading that memory--> Probed

A pair that can't be measured, or not in time, is planned with the costs of the broker's settings.
Agents measure for their own tenant: what another one's say of a host counts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from restow.broker.core.actions import Action, HostPair, SendPeer, SendProbe, SendUnprobe
from restow.broker.core.engines import AgentRecord, EngineRecord, is_memory
from restow.broker.core.events import Probed
from restow.broker.core.handoff import MAX_REASON
from restow.broker.core.handoff_numbers import Numbers
from restow.broker.core.limits import Limits
from restow.broker.core.pair import PairPlan
from restow.broker.errors import CostsInvalidError
from restow.broker.planner import CopyCosts, CostModel


@dataclass(slots=True, eq=False)
class HostCosts:
    """What is known of a pair of hosts."""

    costs: CostModel | None = None
    failure: str = ""
    again_s: float = 0.0
    """When a failed measurement may be repeated."""


@dataclass(slots=True, eq=False)
class _Probe:
    """A measurement under way, and the handoffs that wait for it."""

    number: int
    hosts: HostPair
    source: AgentRecord
    destination: AgentRecord
    begun_s: float
    until_s: float
    copying: CopyCosts | None = None
    """Of the source, once it has answered."""
    stage_s: float = 0.0
    waiting: set[int] = field(default_factory=set)


class Probing:
    """The costs of all pairs of hosts. Pure, like the directory that it serves."""

    def __init__(self, limits: Limits, enabled: bool, numbers: Numbers) -> None:
        """Know nothing; not ``enabled``: never ask. ``numbers`` are those of all probes."""
        self.known: OrderedDict[HostPair, HostCosts] = OrderedDict()
        self._limits = limits
        self._enabled = enabled
        self._numbers = numbers
        self._running: dict[int, _Probe] = {}
        self._by_hosts: dict[HostPair, _Probe] = {}

    def costs(self, source: EngineRecord, destination: EngineRecord) -> HostPair | None:
        """The hosts of two engines whose costs are known; those of their first ranks."""
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
        hosts = _hosts(source, destination) if self._enabled else None
        if hosts is None:
            return None
        first, second = _first(source), _first(destination)
        # A measurement hands the right to read over: nobody gets it who would not get it anyway.
        if first.key.rank not in plan.sources.get(second.key.rank, ()):
            return None
        known = self.known.get(hosts)
        if known is not None and (known.costs is not None or now_s < known.again_s):
            return None
        running = self._by_hosts.get(hosts)
        if running is not None:
            running.waiting.add(handoff)
            return []
        size_bytes = min(self._limits.probe_bytes, first.staging_bytes, second.staging_bytes)
        if not size_bytes:
            return None
        number, until_s = self._numbers.take(now_s), now_s + self._limits.probe_s
        probe = _Probe(number, hosts, first, second, now_s, until_s)
        probe.waiting.add(handoff)
        self._running[probe.number] = self._by_hosts[hosts] = probe
        return [SendProbe(first.key, probe.number, size_bytes)]

    def awaited_by(self, handoff: int) -> bool:
        """Whether a handoff waits for a measurement that is under way."""
        return any(handoff in probe.waiting for probe in self._running.values())

    def answered(
        self, agent: AgentRecord, answer: Probed, now_s: float
    ) -> tuple[list[Action], set[int]]:
        """An agent has measured: what follows, and the handoffs that wait no more."""
        probe = self._running.get(answer.number)
        if probe is None:
            return [], set()
        if answer.reason and agent in (probe.source, probe.destination):
            return self._end(probe, HostCosts(failure=answer.reason[:MAX_REASON]), now_s)
        if agent is probe.source and probe.copying is None:
            if not is_memory(answer.address, answer.size_bytes):
                return self._end(probe, HostCosts(failure="ARGUMENT_INVALID"), now_s)
            probe.copying = answer.copying
            probe.stage_s = max(now_s - probe.begun_s - answer.elapsed_us / 1e6, 0.0)
            return self._ask_reader(probe, answer), set()
        if agent is probe.destination and probe.copying is not None and answer.reading is not None:
            try:
                costs = CostModel.measured(
                    probe.copying, answer.copying, answer.reading, probe.stage_s
                )
            except CostsInvalidError as error:
                return self._end(probe, HostCosts(failure=error.message), now_s)
            return self._end(probe, HostCosts(costs), now_s)
        return [], set()

    def tick(self, now_s: float) -> tuple[list[Action], set[int]]:
        """Give up what takes too long, and what has lost an agent."""
        actions: list[Action] = []
        waiting: set[int] = set()
        for probe in list(self._running.values()):
            lost = probe.source.gone or probe.destination.gone
            if lost or now_s > probe.until_s:
                failure = HostCosts(failure="AGENT_LOST" if lost else "TIMEOUT")
                more, freed = self._end(probe, failure, now_s)
                actions += more
                waiting |= freed
        return actions, waiting

    @staticmethod
    def _ask_reader(probe: _Probe, held: Probed) -> list[Action]:
        reader, peer = probe.destination, probe.source
        actions: list[Action] = []
        if peer.agent_name not in reader.peers:
            reader.peers.add(peer.agent_name)
            actions.append(SendPeer(reader.key, peer.key))
        actions.append(SendProbe(reader.key, probe.number, held.size_bytes, peer.key, held.address))
        return actions

    def _end(
        self, probe: _Probe, outcome: HostCosts, now_s: float
    ) -> tuple[list[Action], set[int]]:
        del self._running[probe.number], self._by_hosts[probe.hosts]
        outcome.again_s = now_s + self._limits.probe_again_s
        self.known[probe.hosts] = outcome
        if len(self.known) > self._limits.max_pairs:
            self.known.popitem(last=False)
        holder = probe.source
        actions: list[Action] = [] if holder.gone else [SendUnprobe(holder.key, probe.number)]
        return actions, probe.waiting


def _first(engine: EngineRecord) -> AgentRecord:
    return engine.agents[min(engine.agents)]


def _hosts(source: EngineRecord, destination: EngineRecord) -> HostPair | None:
    if not (source.agents and destination.agents):
        return None
    source_host, destination_host = _first(source).host, _first(destination).host
    if not (source_host and destination_host):
        return None
    return HostPair(source.key.tenant, source_host, destination_host)
