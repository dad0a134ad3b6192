"""What both sides of an engine count in an interval, as plain values that vLLM carries and adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

POOLS = ("gather", "scatter")


def nothing() -> dict[str, Any]:
    """The values of an interval in which nothing happened."""
    return {
        # Of the scheduler's side.
        "transfers": [],
        "failures": {},
        "waits": [],
        "external_tokens": 0,
        "states_sent": 0,
        "present": {},
        # Of the workers' agents. By transport: reads, bytes and errors.
        "reads": {},
        "lanes_given_up": 0,
        "staging_used_bytes": {},
    }


def both(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of two sides, or of two intervals; what there is at the moment is the later's.

    Of staging in use the most that one rank had.
    """
    reads = {kind: list(counts) for kind, counts in mine["reads"].items()}
    for kind, counts in theirs["reads"].items():
        so_far = reads.get(kind, [0, 0, 0])
        reads[kind] = [one + more for one, more in zip(so_far, counts, strict=True)]
    used = dict(mine["staging_used_bytes"])
    for pool, size_bytes in theirs["staging_used_bytes"].items():
        used[pool] = max(size_bytes, used.get(pool, 0))
    sums = ("transfers", "waits", "external_tokens", "states_sent", "lanes_given_up")
    return {
        **{name: mine[name] + theirs[name] for name in sums},
        "failures": dict(Counter(mine["failures"]) + Counter(theirs["failures"])),
        "present": {**mine["present"], **theirs["present"]},
        "reads": reads,
        "staging_used_bytes": used,
    }


def is_nothing(data: Mapping[str, Any]) -> bool:
    """Whether nothing happened."""
    return not any(data.values())
