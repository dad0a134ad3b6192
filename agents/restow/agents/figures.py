"""`AgentFigures` are what an agent has in use at the moment, and what it has read so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from restow.agents.memory.staging_pool import PoolFigures
from restow.agents.reading.read_counts import CountsByKind, add_all, no_reads

NOTHING = PoolFigures()


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Figures of one agent, or of several together."""

    ranks: int = 0
    connected: int = 0
    """Ranks that the broker knows at the moment."""
    gather: PoolFigures = NOTHING
    scatter: PoolFigures = NOTHING
    lanes: int = 0
    """That are open."""
    lanes_given_up: int = 0
    """Since it began, because reads on them did not end."""
    reads: CountsByKind = field(default_factory=no_reads)
    """By kind of transport, since it began."""


def together(figures: Iterable[AgentFigures]) -> AgentFigures:
    """The figures of several agents."""
    all_of_them = tuple(figures)
    reads = no_reads()
    for one in all_of_them:
        add_all(reads, one.reads)
    return AgentFigures(
        sum(one.ranks for one in all_of_them),
        sum(one.connected for one in all_of_them),
        PoolFigures.together(one.gather for one in all_of_them),
        PoolFigures.together(one.scatter for one in all_of_them),
        sum(one.lanes for one in all_of_them),
        sum(one.lanes_given_up for one in all_of_them),
        reads,
    )


def past(figures: AgentFigures) -> AgentFigures:
    """What stays of an agent that is gone: what it has counted, and nothing that it held."""
    return AgentFigures(lanes_given_up=figures.lanes_given_up, reads=figures.reads)
