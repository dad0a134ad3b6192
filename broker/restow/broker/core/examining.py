"""Over which transport one engine's agent reads from another's: asked by operators.

    source's agent:       Probe --holds memory--> Probed
    destination's agent:            Probe, name_transport --reads that once--> Probed

Nothing is kept: an operator who asks again wants to know how it is now.
"""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.core.actions import Action, SendPeer, SendProbe, SendUnprobe, TellExamined
from restow.broker.core.engines import AgentRecord, EngineRecord, is_memory
from restow.broker.core.events import Probed
from restow.broker.core.handoff import MAX_REASON
from restow.broker.core.handoff_numbers import Numbers
from restow.broker.core.limits import Limits
from restow.broker.errors import PairNotReadyError, QuotaExceededError

MAX_EXAMINATIONS = 8
"""At once: each is a process on D's host."""
MAX_DETAIL = 512


@dataclass(slots=True, eq=False)
class _Examination:
    """One that is under way."""

    number: int
    source: AgentRecord
    destination: AgentRecord
    until_s: float
    asked_reader: bool = False


class Examining:
    """All examinations under way. Pure, like the directory that it serves."""

    def __init__(self, limits: Limits, numbers: Numbers) -> None:
        """``numbers`` are those of all probes: agents know no other difference."""
        self._limits = limits
        self._numbers = numbers
        self._running: dict[int, _Examination] = {}

    def begin(
        self, source: EngineRecord, destination: EngineRecord, now_s: float
    ) -> tuple[int, list[Action]]:
        """Its number, by which `TellExamined` tells how it ended.

        Raises `PairNotReadyError` and `QuotaExceededError`; then nothing was begun.
        """
        first, second = _first(source), _first(destination)
        if first is second:
            raise PairNotReadyError(
                f"engine {source.key.engine_id} does not read from itself: name two engines",
                engine=source.key.engine_id,
            )
        if len(self._running) >= MAX_EXAMINATIONS:
            raise QuotaExceededError(
                f"{MAX_EXAMINATIONS} pairs are being probed: ask again when one of them is done"
            )
        number, until_s = self._numbers.take(now_s), now_s + self._limits.examine_s
        self._running[number] = _Examination(number, first, second, until_s)
        size_bytes = min(self._limits.examine_bytes, first.staging_bytes)
        return number, [SendProbe(first.key, number, size_bytes)]

    def answered(self, agent: AgentRecord, answer: Probed) -> list[Action]:
        """An agent holds memory, or has read; nothing for answers to anything else."""
        one = self._running.get(answer.number)
        if one is None or agent not in (one.source, one.destination):
            return []
        if answer.reason:
            return self._end(one, reason=answer.reason, detail=answer.detail)
        if agent is one.source and not one.asked_reader:
            if not is_memory(answer.address, answer.size_bytes):
                words = f"it says that it holds {answer.size_bytes} bytes at {answer.address}"
                return self._end(one, reason="ARGUMENT_INVALID", detail=words)
            one.asked_reader = True
            return self._ask_reader(one, answer)
        if agent is one.destination and one.asked_reader:
            if not answer.transport:
                words = "the agent is of a version that does not say over what it reads"
                return self._end(one, reason="TRANSPORT_UNKNOWN", detail=words)
            return self._end(one, transport=answer.transport, method=answer.method)
        return []

    def tick(self, now_s: float) -> list[Action]:
        """Give up what takes too long, and what has lost an agent."""
        actions: list[Action] = []
        for one in list(self._running.values()):
            if one.source.gone or one.destination.gone:
                lost = one.source if one.source.gone else one.destination
                words = f"agent {lost.agent_name} is gone"
                actions += self._end(one, reason="AGENT_LOST", detail=words)
            elif now_s > one.until_s:
                slow = one.destination if one.asked_reader else one.source
                words = f"agent {slow.agent_name} did not answer in {self._limits.examine_s:g} s"
                actions += self._end(one, reason="TIMEOUT", detail=words)
        return actions

    @staticmethod
    def _ask_reader(one: _Examination, held: Probed) -> list[Action]:
        reader, peer = one.destination, one.source
        actions: list[Action] = []
        if peer.agent_name not in reader.peers:
            reader.peers.add(peer.agent_name)
            actions.append(SendPeer(reader.key, peer.key))
        actions.append(
            SendProbe(reader.key, one.number, held.size_bytes, peer.key, held.address, True)
        )
        return actions

    def _end(
        self,
        one: _Examination,
        *,
        transport: str = "",
        method: str = "",
        reason: str = "",
        detail: str = "",
    ) -> list[Action]:
        del self._running[one.number]
        actions: list[Action] = []
        if not one.source.gone:
            actions.append(SendUnprobe(one.source.key, one.number))
        ranks = (one.source.key.rank, one.destination.key.rank)
        words = (transport[:MAX_REASON], method[:MAX_REASON], reason[:MAX_REASON])
        return [*actions, TellExamined(one.number, *ranks, *words, detail[:MAX_DETAIL])]


def _first(engine: EngineRecord) -> AgentRecord:
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
