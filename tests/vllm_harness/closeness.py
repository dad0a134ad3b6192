"""Whether engines that round otherwise say the same."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from vllm_harness.engine import Answer

MAX_DIFFERENCE = 1.0
MAX_MEAN = 0.1
"""Logprobs between 0 and 5, in bfloat16: two engines of other ranks, each alone, were seen to
differ by up to 0.16, and by 0.26 where one had the other's state; by 0.04 in the mean. On
an AMD EPYC two that were alone differed by up to 0.29, and said another token
where one preferred its own by 0.69."""


def assert_alike(found: Sequence[Answer], expected: Sequence[Answer]) -> int:
    """Check that each pair of answers is alike up to a step at which two tokens were as likely.

    Returns how many steps were compared. All were asked with ``logprobs=2``.
    """
    steps = [_differences(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    all_of_them = [difference for one in steps for difference in one]
    assert all_of_them, "the other engine tossed a coin at every first step"
    print(f"{len(all_of_them)} steps: {[len(one) for one in steps]}", end=", ")
    print(f"differ by {fmean(all_of_them):.3f}, at most {max(all_of_them):.3f}")
    assert fmean(all_of_them) < MAX_MEAN, steps
    return len(all_of_them)


def _differences(found: Answer, expected: Answer) -> list[float]:
    assert len(found.tokens) == len(expected.tokens), (found, expected)
    differences: list[float] = []
    for step, (ours, theirs) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        best, second = sorted(theirs.values(), reverse=True)[:2]
        if found.tokens[step] != expected.tokens[step]:
            assert best - second < MAX_DIFFERENCE, (step, ours, theirs)
            break
        differences.append(abs(ours[found.tokens[step]] - best))
        assert differences[-1] < MAX_DIFFERENCE, (step, ours, theirs)
    return differences
