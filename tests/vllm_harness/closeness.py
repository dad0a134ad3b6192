"""Whether two engines that round otherwise say the same."""

from __future__ import annotations

from vllm_harness.engine import Answer

ROUNDING = 0.25
"""More than logprobs were seen to differ by in bfloat16, of values between 0 and 5."""


def assert_same(found: Answer, expected: Answer) -> int:
    """Up to where the other engine tossed a coin; returns how many steps that were.

    Both asked with ``logprobs=2``.
    """
    for step, (ours, theirs) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        best, second = sorted(theirs.values(), reverse=True)[:2]
        if found.tokens[step] != expected.tokens[step]:
            assert best - second < ROUNDING, (step, ours, theirs)
            return step
        assert abs(ours[found.tokens[step]] - best) < ROUNDING, (step, ours, theirs)
    return len(expected.tokens)
