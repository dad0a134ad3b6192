"""Probes: agents measure what reading between hosts costs, and over what transport it goes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.common.actions import Action, SendPeer, SendProbe, SendUnprobe, TellExamined
from restow.broker.core.common.events import Probed
from restow.broker.core.common.keys import HostPair
from restow.broker.core.common.limits import Limits, Numbering
from restow.broker.core.common.pair import PairPlan
from restow.broker.core.engines.agent import AgentRecord, is_memory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import MAX_REASON
from restow.broker.core.ledger.statistics import Durations
from restow.broker.errors import CostsInvalidError, PairNotReadyError, QuotaExceededError
from restow.broker.planner import CostModel


@dataclass(slots=True, eq=False)
class Probe:
    """One that is under way."""

    number: int
    source: AgentRecord
    destination: AgentRecord
    names_transport: bool
    """Whether the reader says over what it reads, and measures nothing."""
    begun_s: float
    until_s: float
    held: Probed | None = None
    """What the source answered."""
    held_s: float = 0.0


class ProbeEnd(NamedTuple):
    """How one ended: by the reader's ``answer``, or for a ``reason``."""

    probe: Probe
    answer: Probed | None = None
    reason: str = ""
    detail: str = ""


class Probes:
    """Those of one kind. Pure: agents' answers and the time go in, actions and ends come out."""

    def __init__(self, numbering: Numbering) -> None:
        """``numbering`` is that of all probes: agents tell kinds apart by nothing else."""
        self._numbering = numbering
        self._running: dict[int, Probe] = {}

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._running)

    def begin(
        self,
        source: AgentRecord,
        destination: AgentRecord,
        size_bytes: int,
        now_s: float,
        until_s: float,
        *,
        names_transport: bool = False,
    ) -> tuple[Probe, list[Action]]:
        """Have the source hold ``size_bytes``."""
        number = self._numbering.take(now_s)
        probe = Probe(number, source, destination, names_transport, now_s, until_s)
        self._running[number] = probe
        return probe, [SendProbe(source.key, number, size_bytes)]

    def answered(
        self, agent: AgentRecord, answer: Probed, now_s: float
    ) -> tuple[list[Action], ProbeEnd | None]:
        """An agent holds memory, has read, or could not; nothing for answers to anything else."""
        probe = self._running.get(answer.number)
        if probe is None or agent not in (probe.source, probe.destination):
            return [], None
        if answer.reason:
            return self._end(ProbeEnd(probe, None, answer.reason, answer.detail))
        if agent is probe.source and probe.held is None:
            if not is_memory(answer.address, answer.size_bytes):
                words = f"it says that it holds {answer.size_bytes} bytes at {answer.address}"
                return self._end(ProbeEnd(probe, None, "ARGUMENT_INVALID", words))
            probe.held, probe.held_s = answer, now_s
            return _ask_reader(probe, answer), None
        if agent is probe.destination and probe.held is not None:
            return self._end(ProbeEnd(probe, answer))
        return [], None

    def tick(self, now_s: float) -> tuple[list[Action], list[ProbeEnd]]:
        """Give up what takes too long, and what has lost an agent."""
        actions: list[Action] = []
        ends: list[ProbeEnd] = []
        for probe in list(self._running.values()):
            if probe.source.gone or probe.destination.gone:
                lost = probe.source if probe.source.gone else probe.destination
                end = ProbeEnd(probe, None, "AGENT_LOST", f"agent {lost.agent_name} is gone")
            elif now_s > probe.until_s:
                slow = probe.source if probe.held is None else probe.destination
                patience_s = probe.until_s - probe.begun_s
                words = f"agent {slow.agent_name} did not answer in {patience_s:g} s"
                end = ProbeEnd(probe, None, "TIMEOUT", words)
            else:
                continue
            actions += self._end(end)[0]
            ends.append(end)
        return actions, ends

    def _end(self, end: ProbeEnd) -> tuple[list[Action], ProbeEnd]:
        probe = end.probe
        del self._running[probe.number]
        if probe.source.gone:
            return [], end
        return [SendUnprobe(probe.source.key, probe.number)], end


def _ask_reader(probe: Probe, held: Probed) -> list[Action]:
    reader, peer = probe.destination, probe.source
    actions: list[Action] = []
    if peer.agent_name not in reader.peers:
        reader.peers.add(peer.agent_name)
        actions.append(SendPeer(reader.key, peer.key))
    asked = SendProbe(
        reader.key, probe.number, held.size_bytes, peer.key, held.address, probe.names_transport
    )
    return [*actions, asked]


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
        first, second = _first_agent(source), _first_agent(destination)
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


def _first_agent(engine: EngineRecord) -> AgentRecord:
    return engine.agents[min(engine.agents)]


def _hosts(source: EngineRecord, destination: EngineRecord) -> HostPair | None:
    if not (source.agents and destination.agents):
        return None
    source_host, destination_host = _first_agent(source).host, _first_agent(destination).host
    if not (source_host and destination_host):
        return None
    return HostPair(source.key.tenant, source_host, destination_host)


MAX_EXAMINATIONS = 8
"""At once: each is a process on D's host."""
MAX_DETAIL = 512


class Examining:
    """All examinations under way. Pure, like the directory that it serves."""

    def __init__(self, limits: Limits, numbering: Numbering) -> None:
        """``numbering`` is that of all probes."""
        self._limits = limits
        self._probes = Probes(numbering)

    def begin(
        self, source: EngineRecord, destination: EngineRecord, now_s: float
    ) -> tuple[int, list[Action]]:
        """Its number, by which `TellExamined` tells how it ended.

        Raises `PairNotReadyError` and `QuotaExceededError`; then nothing was begun.
        """
        first, second = _agent_with_staging(source), _agent_with_staging(destination)
        if first is second:
            raise PairNotReadyError(
                f"engine {source.key.engine_id} does not read from itself: name two engines",
                engine=source.key.engine_id,
            )
        if len(self._probes) >= MAX_EXAMINATIONS:
            raise QuotaExceededError(
                f"{MAX_EXAMINATIONS} pairs are being probed: ask again when one of them is done"
            )
        size_bytes = min(self._limits.examine_bytes, first.staging_bytes)
        until_s = now_s + self._limits.examine_s
        probe, actions = self._probes.begin(
            first, second, size_bytes, now_s, until_s, names_transport=True
        )
        return probe.number, actions

    def answered(self, agent: AgentRecord, answer: Probed, now_s: float) -> list[Action]:
        """An agent holds memory, or has read; nothing for answers to anything else."""
        actions, end = self._probes.answered(agent, answer, now_s)
        return actions if end is None else [*actions, _told(end)]

    def tick(self, now_s: float) -> list[Action]:
        """Give up what takes too long, and what has lost an agent."""
        actions, ends = self._probes.tick(now_s)
        return actions + [_told(end) for end in ends]


def _told(end: ProbeEnd) -> TellExamined:
    probe, read = end.probe, end.answer
    reason, detail = end.reason, end.detail
    if read is not None and not read.transport:
        reason = "TRANSPORT_UNKNOWN"
        detail = "the agent is of a version that does not say over what it reads"
    transport, method = (read.transport, read.method) if read is not None else ("", "")
    return TellExamined(
        probe.number,
        probe.source.key.rank,
        probe.destination.key.rank,
        transport[:MAX_REASON],
        method[:MAX_REASON],
        reason[:MAX_REASON],
        detail[:MAX_DETAIL],
    )


def _agent_with_staging(engine: EngineRecord) -> AgentRecord:
    if not engine.agents:
        raise PairNotReadyError(
            f"engine {engine.key.engine_id} has no agent connected: `restow engines` shows who has",
            engine=engine.key.engine_id,
        )
    agent = engine.agents[min(engine.agents)]
    if not agent.staging_bytes:
        raise PairNotReadyError(
            f"rank {agent.key.rank} of engine {engine.key.engine_id} has no staging to be probed "
            f"in: give its agent some",
            engine=engine.key.engine_id,
        )
    return agent
