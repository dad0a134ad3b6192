"""Asks every peer in a process of its own, and scores what it would copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import ours
from peers.geometries import Geometry
from peers.kinds import KINDS
from peers.pages import Form, Page, pages
from peers.score import Copy, Score, score
from peers.wheels import LMCACHE, SGLANG, AbsentError, Wheel

BENCH = Path(__file__).parents[1]
RESTOW = "Restow"


class FormError(Exception):
    """A peer's ranks hold something else than they are compared with: no number would be true."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Whom a process asks, and how it is started."""

    names: tuple[str, ...]
    command: Callable[[], list[str]]


def _vllm() -> list[str]:
    python = os.environ.get("RESTOW_VLLM_PYTHON")
    if python is None:
        raise AbsentError("RESTOW_VLLM_PYTHON names no interpreter that has vLLM")
    return [python, "-m", "peers.probes.vllm_peers"]


def _wheel(wheel: Wheel, module: str) -> list[str]:
    return [sys.executable, "-m", module, str(wheel.fetched()), wheel.version]


ASKED = (
    Asking(
        ("vLLM, NixlConnector", "vLLM, MooncakeConnector", "vLLM, MoRIIOConnector"),
        _vllm,
    ),
    Asking(("SGLang",), lambda: _wheel(SGLANG, "peers.probes.sglang_peer")),
    Asking(("LMCache",), lambda: _wheel(LMCACHE, "peers.probes.lmcache_peer")),
)


def ask(geometries: Sequence[Geometry]) -> dict[str, Any]:
    """The versions of all peers, and a row a geometry with a cell for each: as `table` reads it."""
    versions: dict[str, str] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    for asking in ASKED:
        try:
            for name, found in _answers(asking, geometries).items():
                versions[name], answers[name] = found["version"], found["answers"]
        except AbsentError as absent:
            for name in asking.names:
                versions[name] = ""
                answers[name] = [{"how": "absent", "why": str(absent)}] * len(geometries)
    rows = [
        _row(geometry, {name: all_of_it[index] for name, all_of_it in answers.items()})
        for index, geometry in enumerate(geometries)
    ]
    return {"versions": versions, "rows": rows}


def _answers(asking: Asking, geometries: Sequence[Geometry]) -> dict[str, Any]:
    command = asking.command()
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "asked.json"), Path(folder, "answers.json")
        questions.write_text(json.dumps([one.message() for one in geometries]))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        done = subprocess.run(
            [*command, str(questions), str(answers)],
            env=environment | {"PYTHONPATH": str(BENCH)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode or not answers.exists():
            last = done.stderr.strip().splitlines()[-1:]
            raise AbsentError(last[0] if last else f"its process ends with {done.returncode}")
        found: dict[str, Any] = json.loads(answers.read_text())
        return found


def _row(geometry: Geometry, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Restow's plan is scored between pages of every form that a peer has; the worst is told."""
    kind = KINDS[geometry.kind]
    taps = 0 if kind.family == "gqa" else kind.taps
    layout = geometry.conv_layout or Form().conv
    both = (Form(layout, taps + geometry.p_drafts), Form(layout, taps + geometry.d_drafts))
    forms = {both: None}
    cells: dict[str, Any] = {}
    for name, answer in answers.items():
        if "how" in answer:
            cells[name] = answer
            continue
        used = (Form(**answer["p_form"]), Form(**answer["d_form"]))
        forms[used] = None
        held = _pages(geometry, used)
        lengths = tuple(len(some[0].ids) for some in held)
        if lengths != tuple(answer["page_bytes"]):
            raise FormError(
                f"{geometry}: {name} has pages of {answer['page_bytes']}, not {lengths}"
            )
        _check_channels(geometry, name, answer["channels"])
        cells[name] = _cell(score(*held, [Copy(*copy) for copy in answer["copies"]]))
    scores = [score(*_pages(geometry, some), ours.copies(geometry, *some)) for some in forms]
    cells[RESTOW] = _cell(next((one for one in scores if not one.whole), scores[0]))
    return {"geometry": str(geometry), "cells": cells}


def _check_channels(
    geometry: Geometry, name: str, loaded: tuple[list[list[int]], list[list[int]]] | None
) -> None:
    """Raise `FormError` if a peer's weight loader gives a rank other channels than it is due."""
    kind = KINDS[geometry.kind]
    for tp, ranks in zip((geometry.p_tp, geometry.d_tp), loaded or (), strict=False):
        due = [kind.channels(tp, rank).tolist() for rank in range(tp)]
        if ranks != due:
            raise FormError(f"{geometry}: at TP {tp} ranks of {name} load other channels")


def _pages(geometry: Geometry, forms: tuple[Form, Form]) -> tuple[list[Page], list[Page]]:
    kind = KINDS[geometry.kind]
    return pages(kind, forms[0], geometry.p_tp), pages(kind, forms[1], geometry.d_tp)


def _cell(found: Score) -> dict[str, Any]:
    return asdict(found)
