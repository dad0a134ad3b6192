"""What is said of a reason."""

from __future__ import annotations

from typing import Final, NamedTuple


class Advice(NamedTuple):
    """Of one reason."""

    meaning: str
    next_step: str


OTHER_VERSION: Final = "Run one version of Restow on the broker and on all hosts."
