"""The plan of a pair of layouts, and the choice of handoffs whose content is compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from restow.broker.core.common.events import Failure, Settlement, StagedRun
from restow.broker.core.common.keys import State
from restow.broker.errors import RestowError
from restow.broker.planner import GroupPair, Program, Strategy
from restow.broker.words import Worded

PAIR_BYTES = 8192
"""Overhead of a pair beside its programs."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A launch in which a source rank gathers or only hashes, and its destination ranks."""

    src_rank: int
    dst_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The programs between two layouts, by destination rank."""

    programs: dict[int, Program]
    sources: dict[int, tuple[int, ...]]
    """The source ranks that each destination rank reads from."""
    staging: dict[int, tuple[int, ...]]
    """The source ranks that gather or hash for each destination rank."""
    gathers: tuple[Gather, ...]
    """All launches that gather or hash before a read."""
    src_groups: frozenset[str]
    dst_groups: frozenset[str]
    group_pairs: frozenset[GroupPair] = frozenset()
    """Pairs of a source group and a destination group between which rows travel."""
    strategies: tuple[str, ...] = ()
    """Ways in which at least a row travels."""
    hashed: bool = False
    """Whether sources hash everything that is read from them."""
    early: PairPlan | None = None
    """The programs that read leading tokens before P has computed the whole state; None: there are
    none."""

    @property
    def staged_runs(self) -> int:
        """Return the number of runs that are gathered or hashed."""
        return sum(map(len, self.staging.values()))

    def with_digests(self) -> PairPlan:
        """Return the plan with digests: every source rank hashes before it is read from."""
        gathering = {
            (gather.src_rank, rank) for gather in self.gathers for rank in gather.dst_ranks
        }
        hashing = tuple(
            Gather(src_rank, (dst_rank,))
            for dst_rank, src_ranks in self.sources.items()
            for src_rank in src_ranks
            if (src_rank, dst_rank) not in gathering
        )
        return replace(self, staging=self.sources, gathers=self.gathers + hashing, hashed=True)

    @property
    def keys(self) -> set[int]:
        """Return the keys by which users of these and of the early programs are counted."""
        return {id(plan.programs) for plan in (self, self.early) if plan is not None}

    @property
    def all_programs(self) -> Iterator[Program]:
        """Return all programs, including those that read early."""
        yield from self.programs.values()
        if self.early is not None and self.early.programs is not self.programs:
            yield from self.early.programs.values()

    @property
    def size_bytes(self) -> int:
        """Return the size of all programs."""
        return sum(program.size_bytes for program in self.all_programs)

    @classmethod
    def of(cls, programs: Sequence[Program], early: Sequence[Program] = ()) -> PairPlan:
        """Index the programs of a plan and its ``early`` programs."""
        whole = cls._indexed(programs)
        if not early:
            return whole
        same = [program.program_id for program in early] == [
            program.program_id for program in programs
        ]
        return replace(whole, early=whole if same else cls._indexed(early))

    @classmethod
    def _indexed(cls, programs: Sequence[Program]) -> PairPlan:
        pairs = [pair for program in programs for pair in program.group_pairs]
        used = {way for program in programs for way in program.strategies}
        return cls(
            programs={program.dst_rank: program for program in programs},
            sources={program.dst_rank: program.src_ranks for program in programs},
            staging={program.dst_rank: program.staging_ranks for program in programs},
            gathers=tuple(_gathers(programs)),
            src_groups=frozenset(pair.src.group for pair in pairs if pair.has_source),
            dst_groups=frozenset(pair.dst.group for pair in pairs),
            group_pairs=frozenset(pairs),
            strategies=tuple(way.value for way in Strategy if way in used),
        )


def _gathers(programs: Sequence[Program]) -> Iterator[Gather]:
    """Group gathers; an interleaved state is permuted for all of its readers in one launch."""
    together: dict[int, list[int]] = defaultdict(list)
    for program in programs:
        interleaving = program.interleaving_ranks
        for src_rank in program.staging_ranks:
            if src_rank in interleaving:
                together[src_rank].append(program.dst_rank)
            else:
                yield Gather(src_rank, (program.dst_rank,))
    for src_rank, dst_ranks in together.items():
        yield Gather(src_rank, tuple(dst_ranks))


@dataclass(frozen=True, slots=True)
class PairRefused:
    """Two layouts between which no plan exists."""

    error: RestowError


PairOutcome = PairPlan | PairRefused


def pair_bytes(outcome: PairOutcome) -> int:
    """Return the bytes that are stored for a pair."""
    return PAIR_BYTES + (outcome.size_bytes if isinstance(outcome, PairPlan) else 0)


DIGEST_BYTES = 16
MISMATCH = "DIGEST_MISMATCH"
_MASK = (1 << 64) - 1


class DigestMode(StrEnum):
    """Which handoffs are checked: P hashes the content, and D compares the digests."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Digests(Worded):
    """The handoffs to check; every ``every``-th on average if they are sampled."""

    mode: DigestMode = DigestMode.OFF
    every: int = 64

    def choose(self, number: int) -> bool:
        """Return whether to check a handoff; the answer for a number never changes."""
        if self.mode is not DigestMode.SAMPLED:
            return self.mode is DigestMode.ALL
        return _mixed(number) % self.every == 0


def _mixed(number: int) -> int:
    """Spread all bits of a number over each bit of the result (splitmix64).

    Numbers are times: their low bits are nearly always zero, and clients with a regular rhythm
    would always or never be chosen.
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def not_hashed(run: StagedRun, rank: int) -> Failure | None:
    """Return why a run cannot be read if it lacks the requested digest; otherwise None."""
    if len(run.digest) == DIGEST_BYTES:
        return None
    return _missing(f"rank {rank} of P was to hash what is read from it, and answered no digest")


def not_compared(settlement: Settlement, rank: int) -> Failure | None:
    """Return why a state is unusable if a rank did not compare digests; otherwise None."""
    if settlement.compared:
        return None
    return _missing(f"rank {rank} of D was to compare digests, and did not say that it has")


def _missing(words: str) -> Failure:
    return Failure(State.FAILED, "DIGEST_MISSING", f"{words}: is its agent older than the broker?")


@dataclass(slots=True)
class Checks:
    """Counts of handoffs whose digests were compared."""

    checked: int = 0
    mismatches: int = 0

    def count(self, state: State, failure: Failure | None) -> None:
        """Count an ended handoff with a check; a handoff that failed otherwise was not compared."""
        mismatch = failure is not None and failure.reason == MISMATCH
        self.checked += state is State.DONE or mismatch
        self.mismatches += mismatch
