"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How it is."""

    OK = "ok"
    WARN = "warn"
    """It works, and could be better or soon won't."""
    BAD = "bad"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do."""

    subject: str
    verdict: Verdict
    words: str
    next_step: str = ""


def ok(subject: str, words: str) -> Finding:
    """Nothing to do."""
    return Finding(subject, Verdict.OK, words)


def warn(subject: str, words: str, next_step: str) -> Finding:
    """It works, but."""
    return Finding(subject, Verdict.WARN, words, next_step)


def bad(subject: str, words: str, next_step: str) -> Finding:
    """It does not work."""
    return Finding(subject, Verdict.BAD, words, next_step)
