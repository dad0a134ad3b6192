"""Over which transport one engine's agent reads from another's: asked by operators.

Nothing is kept: an operator who asks again wants to know how it is now.
"""

from __future__ import annotations

from restow.broker.core.actions import Action, TellExamined
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Probed
from restow.broker.core.handoffs.handoff import MAX_REASON
from restow.broker.core.limits import Limits
from restow.broker.core.numbering import Numbering
from restow.broker.core.probing.probes import ProbeEnd, Probes
from restow.broker.errors import PairNotReadyError, QuotaExceededError

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
        first, second = _first(source), _first(destination)
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
