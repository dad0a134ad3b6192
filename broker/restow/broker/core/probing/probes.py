"""Two agents try something together: the source's holds memory, the destination's reads it.

source's agent:       Probe --holds memory--> Probed
destination's agent:            Probe --reads that--> Probed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from restow.broker.core.actions import Action, SendPeer, SendProbe, SendUnprobe
from restow.broker.core.engines.agent import AgentRecord, is_memory
from restow.broker.core.events import Probed
from restow.broker.core.numbering import Numbering


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
