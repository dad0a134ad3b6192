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
"""Of a pair beside its programs."""


@dataclass(frozen=True, slots=True)
class Gather:
    """What a source rank gathers in one launch, or only hashes, and for whom."""

    src_rank: int
    dst_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The programs between two layouts, by destination rank."""

    programs: dict[int, Program]
    sources: dict[int, tuple[int, ...]]
    """Source ranks that each destination rank reads from."""
    staging: dict[int, tuple[int, ...]]
    """Source ranks that gather, or hash, for each destination rank."""
    gathers: tuple[Gather, ...]
    """Everything that has to be gathered or hashed before it is read."""
    src_groups: frozenset[str]
    dst_groups: frozenset[str]
    group_pairs: frozenset[GroupPair] = frozenset()
    """Lists of both sides that are used together."""
    strategies: tuple[str, ...] = ()
    """In which ways any of its rows travel."""
    hashed: bool = False
    """Whether sources hash all that is read from them."""
    early: PairPlan | None = None
    """The programs that read leading tokens before P has computed all; None: there are none."""

    @property
    def staged_runs(self) -> int:
        """How many runs are gathered or hashed."""
        return sum(map(len, self.staging.values()))

    def with_digests(self) -> PairPlan:
        """The same programs; every source is asked before it is read from."""
        gathering = {(one.src_rank, rank) for one in self.gathers for rank in one.dst_ranks}
        hashing = tuple(
            Gather(src_rank, (dst_rank,))
            for dst_rank, src_ranks in self.sources.items()
            for src_rank in src_ranks
            if (src_rank, dst_rank) not in gathering
        )
        return replace(self, staging=self.sources, gathers=self.gathers + hashing, hashed=True)

    @property
    def keys(self) -> set[int]:
        """By which it is known that handoffs use its programs, or those that read early."""
        return {id(one.programs) for one in (self, self.early) if one is not None}

    @property
    def all_programs(self) -> Iterator[Program]:
        """Those that read early, too."""
        yield from self.programs.values()
        if self.early is not None and self.early.programs is not self.programs:
            yield from self.early.programs.values()

    @property
    def size_bytes(self) -> int:
        """Of its programs."""
        return sum(program.size_bytes for program in self.all_programs)

    @classmethod
    def of(cls, programs: Sequence[Program], early: Sequence[Program] = ()) -> PairPlan:
        """Index the programs of a plan, and those of its part that is read ``early``."""
        whole = cls._indexed(programs)
        if not early:
            return whole
        same = [one.program_id for one in early] == [one.program_id for one in programs]
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
    """A state that is interleaved is permuted for all its readers at once."""
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
    """Two layouts between which nothing can be planned."""

    error: RestowError


PairOutcome = PairPlan | PairRefused


def pair_bytes(outcome: PairOutcome) -> int:
    """What is kept of a pair."""
    return PAIR_BYTES + (outcome.size_bytes if isinstance(outcome, PairPlan) else 0)


DIGEST_BYTES = 16
MISMATCH = "DIGEST_MISMATCH"
_MASK = (1 << 64) - 1


class DigestMode(StrEnum):
    """Of which handoffs the content is hashed by P and compared by D."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Digests(Worded):
    """The choice of handoffs; one of ``every`` if they are sampled."""

    mode: DigestMode = DigestMode.OFF
    every: int = 64

    def choose(self, number: int) -> bool:
        """Whether the handoff of that number is checked: always the same for the same number."""
        if self.mode is not DigestMode.SAMPLED:
            return self.mode is DigestMode.ALL
        return _mixed(number) % self.every == 0


def _mixed(number: int) -> int:
    """All bits of a number in each bit of another (splitmix64).

    Numbers are times: their low bits are nearly always zero, and clients that keep a rhythm would
    be chosen always or never.
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def not_hashed(run: StagedRun, rank: int) -> Failure | None:
    """Why a run can't be read, if it came without the digest that was asked for."""
    if len(run.digest) == DIGEST_BYTES:
        return None
    return _missing(f"rank {rank} of P was to hash what is read from it, and answered no digest")


def not_compared(settlement: Settlement, rank: int) -> Failure | None:
    """Why a state can't be used, if a rank did not compare what it was to compare."""
    if settlement.compared:
        return None
    return _missing(f"rank {rank} of D was to compare digests, and did not say that it has")


def _missing(words: str) -> Failure:
    return Failure(State.FAILED, "DIGEST_MISSING", f"{words}: is its agent older than the broker?")


@dataclass(slots=True)
class Checks:
    """Handoffs whose digests were compared."""

    checked: int = 0
    mismatches: int = 0

    def count(self, state: State, failure: Failure | None) -> None:
        """One that was to be checked has ended: one that failed otherwise was not compared."""
        mismatch = failure is not None and failure.reason == MISMATCH
        self.checked += state is State.DONE or mismatch
        self.mismatches += mismatch
