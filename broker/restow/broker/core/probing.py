"""Probes: agents measure the cost of reading between hosts, and report the transport."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.common.actions import Action, SendPeer, SendProbe, SendUnprobe, TellExamined
from restow.broker.core.common.events import Probed
from restow.broker.core.common.keys import HostPair, PairKey
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
    """A probe that is running."""

    number: int
    source: AgentRecord
    destination: AgentRecord
    names_transport: bool
    """Whether the reader reports its transport and measures nothing."""
    begun_s: float
    until_s: float
    held: Probed | None = None
    """The source's answer."""
    held_s: float = 0.0


class ProbeEnd(NamedTuple):
    """The end of a probe: the reader's ``answer``, or the ``reason`` why there is none."""

    probe: Probe
    answer: Probed | None = None
    reason: str = ""
    detail: str = ""


class Probes:
    """The running probes of a kind. They take answers and the time, and return actions and ends."""

    def __init__(self, numbering: Numbering) -> None:
        """Begin without probes; all kinds share ``numbering``, so that numbers are unique."""
        self._numbering = numbering
        self._running: dict[int, Probe] = {}

    def __len__(self) -> int:
        """Return the number of running probes."""
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
        """Begin a probe: tell the source to hold ``size_bytes``."""
        number = self._numbering.take(now_s)
        probe = Probe(number, source, destination, names_transport, now_s, until_s)
        self._running[number] = probe
        return probe, [SendProbe(source.key, number, size_bytes)]

    def answered(
        self, agent: AgentRecord, answer: Probed, now_s: float
    ) -> tuple[list[Action], ProbeEnd | None]:
        """Process an agent's answer; return the end of the probe, if any. Ignore others."""
        probe = self._running.get(answer.number)
        if probe is None or agent not in (probe.source, probe.destination):
            return [], None
        if probe.source.gone or probe.destination.gone:  # `tick` ends it
            return [], None
        if answer.reason:
            return self._end(ProbeEnd(probe, None, answer.reason, answer.detail))
        if agent is probe.source and probe.held is None:
            if not is_memory(answer.address, answer.size_bytes):
                words = f"it reported {answer.size_bytes} bytes at {answer.address}"
                return self._end(ProbeEnd(probe, None, "ARGUMENT_INVALID", words))
            probe.held, probe.held_s = answer, now_s
            return _ask_reader(probe, answer), None
        if agent is probe.destination and probe.held is not None:
            return self._end(ProbeEnd(probe, answer))
        return [], None

    def tick(self, now_s: float) -> tuple[list[Action], list[ProbeEnd]]:
        """End probes that time out or have lost an agent."""
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
    """The measured costs of a pair of hosts."""

    costs: CostModel | None = None
    failure: str = ""
    again_s: float = 0.0
    """When a failed measurement may be repeated."""


class Probing:
    """The costs of all pairs of hosts."""

    def __init__(self, limits: Limits, enabled: bool, numbering: Numbering) -> None:
        """Begin without costs; measure only if ``enabled``. All probes share ``numbering``."""
        self.known: OrderedDict[HostPair, HostCosts] = OrderedDict()
        self._limits = limits
        self._enabled = enabled
        self.measuring = Durations()
        """Durations of measurements, including failed measurements."""
        self._probes = Probes(numbering)
        self._running: dict[HostPair, Probe] = {}
        self._latest: dict[tuple[str, bool, bool], HostPair] = {}
        """Hosts whose costs were measured last, by tenant, whether pages lie on devices, and
        whether both hosts are the same."""

    def at_hand(
        self, source: EngineRecord, destination: EngineRecord
    ) -> tuple[HostPair | None, HostPair | None]:
        """Return the hosts of two engines, and the hosts whose measured costs fit them best.

        The latter are their own hosts, or else similar hosts of the tenant that were measured last.
        """
        if not (self._enabled and source.host and destination.host):
            return None, None
        hosts = HostPair(source.key.tenant, source.host, destination.host)
        if self.are_known(hosts):
            return hosts, hosts
        similar = self._latest.get(_kind(hosts, source.on_device and destination.on_device))
        return hosts, similar if similar in self.known else None

    def are_known(self, hosts: HostPair) -> bool:
        """Return whether the costs between two hosts were measured."""
        known = self.known.get(hosts)
        return known is not None and known.costs is not None

    def costs(self, key: PairKey) -> CostModel | None:
        """Return the costs for which a plan is made; None for the broker's default costs."""
        known = None if key.hosts is None else self.known.get(key.hosts)
        if known is not None and known.costs is not None:
            return known.costs
        return CostModel.of_devices() if self._enabled and key.on_devices else None

    def measure(
        self, source: EngineRecord, destination: EngineRecord, plan: PairPlan, now_s: float
    ) -> list[Action] | None:
        """Start measuring unknown costs, unless that is running; None if nothing is measured."""
        hosts, _ = self.at_hand(source, destination)
        if hosts is None or not (source.agents and destination.agents):
            return None
        first, second = _first_agent(source), _first_agent(destination)
        # A measurement grants the right to read: only pairs that the plan lets read may measure.
        if first.key.rank not in plan.sources.get(second.key.rank, ()):
            return None
        known = self.known.get(hosts)
        if known is not None and (known.costs is not None or now_s < known.again_s):
            return None
        if hosts in self._running:
            return []
        size_bytes = min(self._limits.probe_bytes, first.staging_bytes, second.staging_bytes)
        if not size_bytes:
            return None
        until_s = now_s + self._limits.probe_s
        self._running[hosts], actions = self._probes.begin(
            first, second, size_bytes, now_s, until_s
        )
        return actions

    def answered(self, agent: AgentRecord, answer: Probed, now_s: float) -> list[Action]:
        """Process an agent's answer; answers to anything else are ignored."""
        actions, end = self._probes.answered(agent, answer, now_s)
        if end is not None:
            self._learn(end, now_s)
        return actions

    def tick(self, now_s: float) -> list[Action]:
        """End probes that time out or have lost an agent."""
        actions, ends = self._probes.tick(now_s)
        for end in ends:
            self._learn(end, now_s)
        return actions

    def _learn(self, end: ProbeEnd, now_s: float) -> None:
        """Store the costs or the failure; that an engine left is no failure of its hosts."""
        hosts = next(pair for pair, probe in self._running.items() if probe is end.probe)
        del self._running[hosts]
        self.measuring.add(now_s - end.probe.begun_s)
        if end.probe.source.gone or end.probe.destination.gone:
            return
        outcome = _outcome(end)
        outcome.again_s = now_s + self._limits.probe_again_s
        self.known[hosts] = outcome
        if len(self.known) > self._limits.max_pairs:
            self.known.popitem(last=False)
        if outcome.costs is not None:
            devices = end.probe.source.on_device and end.probe.destination.on_device
            self._latest[_kind(hosts, devices)] = hosts


def _kind(hosts: HostPair, devices: bool) -> tuple[str, bool, bool]:
    return hosts.tenant, devices, hosts.source_host == hosts.destination_host


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


MAX_EXAMINATIONS = 8
"""Limit of concurrent examinations, because each is a process on D's host."""
MAX_DETAIL = 512


class Examining:
    """All running examinations: probes that only report the transport."""

    def __init__(self, limits: Limits, numbering: Numbering) -> None:
        """Begin without examinations; all probes share ``numbering``."""
        self._limits = limits
        self._probes = Probes(numbering)

    def begin(
        self, source: EngineRecord, destination: EngineRecord, now_s: float
    ) -> tuple[int, list[Action]]:
        """Begin an examination; `TellExamined` will report its end under the returned number.

        Raises `PairNotReadyError` and `QuotaExceededError`; then nothing was begun.
        """
        first, second = _agent_with_staging(source), _agent_with_staging(destination)
        if first is second:
            raise PairNotReadyError(
                f"engine {source.key.engine_id} cannot read from itself: name two engines",
                engine=source.key.engine_id,
            )
        if len(self._probes) >= MAX_EXAMINATIONS:
            raise QuotaExceededError(
                f"{MAX_EXAMINATIONS} pairs are already being probed: try again when a probe is done"
            )
        size_bytes = min(self._limits.examine_bytes, first.staging_bytes)
        until_s = now_s + self._limits.examine_s
        probe, actions = self._probes.begin(
            first, second, size_bytes, now_s, until_s, names_transport=True
        )
        return probe.number, actions

    def answered(self, agent: AgentRecord, answer: Probed, now_s: float) -> list[Action]:
        """Process an agent's answer; answers to anything else are ignored."""
        actions, end = self._probes.answered(agent, answer, now_s)
        return actions if end is None else [*actions, _examined(end)]

    def tick(self, now_s: float) -> list[Action]:
        """End probes that time out or have lost an agent."""
        actions, ends = self._probes.tick(now_s)
        return actions + [_examined(end) for end in ends]


def _examined(end: ProbeEnd) -> TellExamined:
    probe, read = end.probe, end.answer
    reason, detail = end.reason, end.detail
    if read is not None and not read.transport:
        reason = "TRANSPORT_UNKNOWN"
        detail = "the agent's version does not report its transport"
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
            f"engine {engine.key.engine_id} has no connected agent: see `restow engines`",
            engine=engine.key.engine_id,
        )
    agent = engine.agents[min(engine.agents)]
    if not agent.staging_bytes:
        raise PairNotReadyError(
            f"rank {agent.key.rank} of engine {engine.key.engine_id} has no staging memory for a "
            f"probe: give its agent staging memory",
            engine=engine.key.engine_id,
        )
    return agent
