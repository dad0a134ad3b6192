"""Many histories, on all processors; a seed alone replays one.

./run simulate --histories 10000
./run simulate --seed 4711
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from restow.broker.core.common.pair import DigestMode, Digests
from simulation_harness.by_content import words_of
from simulation_harness.history import History, Report
from simulation_harness.mutations import MUTATIONS

Prepare = Callable[[History], object]

# A fork of a test's process keeps the locks of gRPC's threads, and can wait on them for ever.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "restow.agents.link.async_agent",
    "restow.broker.server.serve",
    "restow.broker.client",
]


def play(
    seed: int,
    mutation: str = "",
    faults: bool = True,
    digests: Digests | None = None,
    prepare: Prepare | None = None,
) -> Report:
    """Play one history; its digests are off with a mutation, which they would undo.

    Without a mutation they are as the seed says, unless ``digests`` is given. ``prepare`` makes the
    history another one than its seed says.
    """
    if mutation and digests is None:
        digests = Digests()
    history = History(seed, faults, digests)
    if prepare is not None:
        prepare(history)
    if not mutation:
        return history.run()
    with MUTATIONS[mutation](history):
        return history.run()


def _hush() -> None:
    """Silence what Python says of killed processes, which can't clean up after themselves."""
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore", RuntimeWarning)


def _begin() -> None:
    """Prepare a process for many histories.

    Garbage collection skips what exists by now. Torch's threads would wait for each other: every
    processor has a process of its own.
    """
    _hush()
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _play_all(task: tuple[range, str, bool, Digests | None, Prepare | None]) -> list[Report]:
    seeds, mutation, faults, digests, prepare = task
    gc.collect()  # so that what is left of the last ones does not pile up
    return [play(seed, mutation, faults, digests, prepare) for seed in seeds]


def histories(
    first: int,
    count: int,
    mutation: str = "",
    faults: bool = True,
    digests: Digests | None = None,
    prepare: Prepare | None = None,
) -> Iterator[list[Report]]:
    """Yield reports as they come, from as many processes as there are processors."""
    size = 5 if mutation else 25  # a mutation is found in a few of them
    tasks = [
        (range(seed, min(seed + size, first + count)), mutation, faults, digests, prepare)
        for seed in range(first, first + count, size)
    ]
    processors = len(os.sched_getaffinity(0))
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    with _CONTEXT.Pool(processors, _begin) as pool:
        yield from pool.imap_unordered(_play_all, tasks)


def main() -> int:
    """Print what was found; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="./run simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one alone")
    parser.add_argument("--digests", choices=[*DigestMode], help="in all of them")
    parser.add_argument("--without", choices=MUTATIONS, default="", help="take a promise out")
    parser.add_argument(
        "--several",
        action="store_true",
        help="several brokers in all of them, where nothing else fails than these and their etcd",
    )
    options = parser.parse_args()
    began_s = time.perf_counter()
    digests = Digests(DigestMode(options.digests), 2) if options.digests else None
    prepare = History.be_several if options.several else None
    found: Iterable[list[Report]]
    if options.seed is not None:
        _hush()
        found = [[play(options.seed, options.without, True, digests, prepare)]]
    else:
        how = (options.without, True, digests, prepare)
        found = histories(options.first, options.histories, *how)
    events, count, broken, acts = 0, 0, 0, 0
    ended, faults, offers, unhindered, commands = (Counter[str]() for _ in range(5))
    for reports in found:
        for report in reports:
            count += 1
            events += report.events
            ended += report.ended
            offers += report.offers
            unhindered += report.unhindered
            commands += report.commands
            acts += report.acts
            faults.update(fault.split()[1] for fault in report.faults)
            if report.violation or options.seed is not None:
                print(f"seed {report.seed}: {report.violation or 'well'}")
                print(f"    {'; '.join(report.faults)}")
            if options.seed is not None:
                print(report.trace)
            broken += bool(report.violation)
    print(
        f"{count} histories, {events} events, {broken} broken, in "
        f"{time.perf_counter() - began_s:.1f} s; handoffs {dict(ended)}; "
        f"faults {dict(faults)}; of several brokers {acts} batches that grant, end or free, and "
        f"handoffs that only these stood in the way of {dict(unhindered)}"
    )
    print(words_of(offers, broken))
    print(f"commands about states: {dict(sorted(commands.items()))}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
