"""A source process that gathers small runs in small parts, and as slowly as a test needs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from agent_harness.source_main import serve_source
from restow.agents import gathering, parts
from restow.agents.copying import PreparedCopies
from restow.agents.errors import CopyFailedError
from restow.agents.parts import Parts
from restow.agents.pieces import Copies


def serve_gradually(
    pipe: Connection,
    case_name: str,
    broker: str,
    part_bytes: int,
    pause_s: float = 0.0,
    broken_from: int = 1 << 30,
) -> None:
    """Serve the case; parts wait ``pause_s``, but the first; from ``broken_from`` on they break."""
    parts.PART_BYTES = part_bytes
    gathering.WORTHWHILE_BYTES = 1  # type: ignore[attr-defined]
    right = Parts.prepared_gather

    def prepared(
        self: Parts, copies: Sequence[Copies], device: torch.device
    ) -> list[PreparedCopies]:
        found = right(self, copies, device)
        return [_slowed(one, number, pause_s, broken_from) for number, one in enumerate(found)]

    Parts.prepared_gather = prepared  # type: ignore[method-assign]
    serve_source(pipe, case_name, broker)


def _slowed(
    copies: PreparedCopies, number: int, pause_s: float, broken_from: int
) -> PreparedCopies:
    def pieces() -> None:
        if number:
            time.sleep(pause_s)
        if number >= broken_from:
            raise CopyFailedError("it broke on purpose")
        copies()

    return PreparedCopies(copies.rows, copies.device, pieces)
