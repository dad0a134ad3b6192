"""The questions and answers of a process that asks a peer, as JSON, without anything of Restow.

The process runs in the peer's own environment, or with the standard library alone.
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
    """The peer copies nothing: ``how`` is for the table, the message is the peer's reason."""

    how = "refuses"


class RefusedError(DeclinedError):
    """The peer raises, or answers with an error."""


class MissedError(DeclinedError):
    """The peer finds nothing of P's, so D computes the prompt itself."""

    how = "misses"


class NotAskedError(DeclinedError):
    """The peer has no function that could be asked."""

    how = "not asked"


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
    """The copies that a peer makes between pages of two forms (fields of `Form`).

    ``page_bytes`` are those of the peer's own shapes at P and D. ``channels`` are those that the
    peer's own weight loader gives every rank of P, and of D.
    """

    p_form: dict[str, Any]
    d_form: dict[str, Any]
    page_bytes: tuple[int, int]
    copies: list[Place]
    channels: tuple[list[list[int]], list[list[int]]] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: its name in the table, its version, and the function that answers."""

    name: str
    version: str
    answer: Callable[[Asked], Copied]


def answer_all(peers: list[Peer]) -> None:
    """Read geometries from the first of two files, and write the answers to the second."""
    questions, answers = (Path(name) for name in sys.argv[-2:])
    asked = [Asked(**question) for question in json.loads(questions.read_text())]
    by_peer = {
        peer.name: {
            "version": peer.version,
            "answers": [_answer(peer, question) for question in asked],
        }
        for peer in peers
    }
    answers.write_text(json.dumps(by_peer))


def _answer(peer: Peer, asked: Asked) -> dict[str, Any]:
    try:
        return asdict(peer.answer(asked))
    except DeclinedError as declined:
        return {"how": declined.how, "why": str(declined)}
