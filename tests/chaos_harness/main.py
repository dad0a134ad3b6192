"""Real processes and real NIXL, killed, stopped and cut off at random; every byte is checked.

./run chaos --minutes 10
./run chaos --minutes 1440 --seed 7
./run chaos --minutes 10 --brokers 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from rich.console import Console

from chaos_harness.cluster import WIRES, Cluster
from chaos_harness.fleet import WIRES as fleet_wires
from chaos_harness.fleet import Fleet
from chaos_harness.fleet_storm import FleetStorm
from chaos_harness.hosts import Hosts, why_not
from chaos_harness.report import Report, Usage
from chaos_harness.storm import Storm

PROGRESS_S = 20.0
CALM_S = 20.0


async def play(report: Report, progress: Console | None = None) -> Report:
    """Run a storm of faults, then wait for calm."""
    rng = Random(report.seed)  # noqa: S311 - reproducible, not secret
    with contextlib.ExitStack() as stack:
        several = report.brokers > 1
        wires = fleet_wires if several else WIRES
        hosts = None if report.cuts else stack.enter_context(Hosts(wires))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restow-fleet-")))
        fleet = Fleet(folder, hosts) if several else None
        async with Cluster(rng, hosts, transports=report.transports, fleet=fleet) as cluster:
            storm = (
                Storm(cluster, rng, can_cut=hosts is not None)
                if fleet is None
                else FleetStorm(cluster, fleet, rng, can_cut=hosts is not None)
            )
            storm.start_broker()
            for side in "PD":
                storm.start_engine(side)
            storm.start_store()
            await cluster.connected()
            watch = asyncio.create_task(_watch(cluster, storm, progress))
            await storm.blow(report.minutes * 60)
            watch.cancel()
            await _after(cluster, storm, report)
    return report


async def _after(cluster: Cluster, storm: Storm, report: Report) -> None:
    began_s = time.monotonic()
    report.left = await storm.heal()
    report.healed_after_s = time.monotonic() - began_s
    report.handoffs, found = storm.handoffs + storm.asked, cluster.found
    report.faults, report.lives = dict(storm.faults), dict(cluster.lives)
    if not report.left:
        await storm.calm(CALM_S)  # until all has grown to its size
        report.left = await storm.heal()
        report.usage_before = _usage(cluster)
        await storm.calm(CALM_S)
        report.left = report.left or await storm.heal()
        report.usage_after = _usage(cluster)
        report.calm_handoffs = storm.handoffs + storm.asked - report.handoffs
    report.commands = dict(storm.commands)
    report.violations, report.late_s = found.violations, found.late_s
    report.crashes = found.crashes
    report.asked_of_store = len(storm.later)
    report.given_by_store = sum(found.said.get(one) == ("DONE", "") for one in storm.later)
    report.without_end = [" ".join(one) for one in storm.begun() if one not in found.said]
    report.ends = {" ".join(end).strip(): count for end, count in found.ends.items()}


def _usage(cluster: Cluster) -> dict[str, Usage]:
    return {one.name: Usage(one.resident_bytes, one.open_files) for one in cluster.members}


async def _watch(cluster: Cluster, storm: Storm, progress: Console | None) -> None:
    began_s = time.monotonic()
    while progress is not None:
        await asyncio.sleep(PROGRESS_S)
        done = sum(count for end, count in cluster.found.ends.items() if end[:2] == ("D", "DONE"))
        progress.print(
            f"{time.monotonic() - began_s:.0f} s: {storm.handoffs} handoffs, {done} done, "
            f"{sum(storm.faults.values())} faults, {len(cluster.found.violations)} broken"
        )


def main() -> int:
    """Print a report; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="./run chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--brokers", type=int, choices=(1, 3), default=1, help="3: with three members of etcd"
    )
    parser.add_argument("--seed", type=int, help="of the schedule; processes have their own pace")
    parser.add_argument(
        "--transports", default="tcp", help="UCX_TLS of the engines; 'all': what UCX finds"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    console = Console(stderr=True)
    console.print(f"seed {seed}")
    report = Report(seed, options.minutes, options.transports, why_not(), options.brokers)
    asyncio.run(play(report, console))
    if options.out:
        options.out.write_text(report.json() + "\n")
    if options.json:
        print(report.json())
    else:
        report.show(Console())
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
