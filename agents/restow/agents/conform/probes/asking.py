"""The questions and answers of a probe, as JSON: `judge` starts it with the names of two files.

A probe of a connector that is not listed is a file that calls `answer_all`:
``from probes.asking import Asked, Copied, answer_all``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Place = tuple[int, int, int, int, int]
"""Rank of P, rank of D, offset in P's page, offset in D's page, length: all in bytes."""


class DeclinedError(Exception):
    """The connector copies nothing: ``verdict`` is for the report, the message is the reason."""

    verdict = "refused"


class RefusedError(DeclinedError):
    """The connector raises, or answers with an error."""


class MissedError(DeclinedError):
    """The connector finds nothing of P's, so D computes the prompt itself."""

    verdict = "missed"


class NotAskedError(DeclinedError):
    """The connector has no function that could be asked."""

    verdict = "not asked"


@dataclass(frozen=True, slots=True)
class Asked:
    """A geometry, as `Geometry.message` describes it."""

    family: str
    sizes: dict[str, int]
    p_tp: int
    d_tp: int
    conv_layout: str
    p_drafts: int
    d_drafts: int
    page_tokens: int

    @property
    def attention(self) -> bool:
        """Return whether the layer has K and V instead of a recurrent state."""
        return self.family == "gqa"


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies that a connector makes between pages of two forms (fields of `Form`).

    ``page_bytes`` are those of the connector's own shapes at P and D. ``channels`` are those that
    the engine's own weight loader gives every rank of P, and of D.
    """

    p_form: dict[str, Any]
    d_form: dict[str, Any]
    page_bytes: tuple[int, int]
    copies: list[Place]
    channels: tuple[list[list[int]], list[list[int]]] | None = None


def answer_all(version: str, answer: Callable[[Asked], Copied]) -> None:
    """Read geometries from the first of two files, and write the answers to the second."""
    questions, answers = (Path(name) for name in sys.argv[-2:])
    asked = [Asked(**question) for question in json.loads(questions.read_text())]
    found = {"version": version, "answers": [_answer(answer, question) for question in asked]}
    answers.write_text(json.dumps(found))


def _answer(answer: Callable[[Asked], Copied], asked: Asked) -> dict[str, Any]:
    try:
        return asdict(answer(asked))
    except DeclinedError as declined:
        return {"verdict": declined.verdict, "why": str(declined)}
