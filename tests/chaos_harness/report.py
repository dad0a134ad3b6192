"""What a storm has shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    resident_bytes: int
    open_files: int


@dataclass
class Report:
    """All figures. ``left`` is what had not ended after all was healed; empty if nothing."""

    seed: int
    minutes: float
    transports: str
    cuts: str
    """Why hosts could not be cut off from each other; empty if they were."""
    brokers: int = 1
    handoffs: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    without_end: list[str] = field(default_factory=list)
    """Side and handoff."""
    commands: dict[str, int] = field(default_factory=dict)
    """How commands to the store have ended."""
    asked_of_store: int = 0
    """States that engines had evicted when they were asked for, by their content."""
    given_by_store: int = 0
    """Those of them that came."""
    late_s: dict[str, float] = field(default_factory=dict)
    healed_after_s: float = 0.0
    left: str = ""
    usage_before: dict[str, Usage] = field(default_factory=dict)
    usage_after: dict[str, Usage] = field(default_factory=dict)
    """Before and after a calm time at the end, in which nobody died."""
    calm_handoffs: int = 0
    left_behind: list[str] = field(default_factory=list)
    """Shared memory of ours that nobody uses any more."""

    @property
    def holds(self) -> bool:
        """Return whether every promise was kept."""
        return not (self.violations or self.left or self.without_end)

    def json(self) -> str:
        """Return the report as JSON, for scripts."""
        return json.dumps(asdict(self), indent=2)

    def show(self, console: Console) -> None:
        """Print the report as a table, for people."""
        table = Table(
            title=f"Chaos, seed {self.seed}: {self.minutes:g} min, brokers: {self.brokers}",
            show_header=False,
        )
        table.add_row("handoffs", str(self.handoffs))
        for end, count in _by_count(self.ends):
            table.add_row(f"  {end}", str(count))
        table.add_row("states that engines had evicted", str(self.asked_of_store))
        table.add_row("  came from the store", str(self.given_by_store))
        table.add_row("commands to the store", str(sum(self.commands.values())))
        for outcome, count in _by_count(self.commands):
            table.add_row(f"  {outcome}", str(count))
        table.add_row("faults", str(sum(self.faults.values())))
        for fault, count in _by_count(self.faults):
            table.add_row(f"  {fault}", str(count))
        table.add_row("wrong bytes accepted, pages written late", str(len(self.violations)))
        table.add_row("processes that ended by themselves", str(len(self.crashes)))
        table.add_row("handoffs without an end", ", ".join(self.without_end[:20]) or "none")
        table.add_row("all pages back after", f"{self.healed_after_s:.1f} s")
        table.add_row("left", self.left or "nothing")
        for name, before in self.usage_before.items():
            after = self.usage_after[name]
            table.add_row(
                f"{name}: resident, open files",
                f"{before.resident_bytes >> 20} MiB, {before.open_files}; after "
                f"{self.calm_handoffs} more handoffs {after.resident_bytes >> 20} MiB, "
                f"{after.open_files}",
            )
        console.print(table)
        for violation in self.violations[:20]:
            console.print(f"BROKEN: {violation}", markup=False)
        for crash in self.crashes[:5]:
            console.print(f"ENDED BY ITSELF: {crash}", markup=False)
        if self.cuts:
            console.print(f"NO HOST WAS CUT OFF: {self.cuts}", markup=False)


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
