"""The shape of the advice that Restow gives for a reason."""

from __future__ import annotations

from typing import Final, NamedTuple


class Advice(NamedTuple):
    """What a reason means, and what to do about it."""

    meaning: str
    next_step: str


OTHER_VERSION: Final = "Run one version of Restow on the broker and on all hosts."
