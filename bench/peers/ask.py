"""Ask every peer in a process of its own which bytes it would copy, and score the copies.

Only the sources of SGLang and LMCache are read. Their wheels are fetched by version and hash;
nothing that they require is installed, and neither is imported.
"""

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

from bench.peers import restow_plan
from bench.peers.layers import KINDS, Geometry
from bench.peers.score import Copy, Form, Page, Score, pages, score

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".peers"
RESTOW = "Restow"


class FormError(Exception):
    """A peer's ranks hold something else than they are compared with, so no share would be true."""


@dataclass(frozen=True, slots=True)
class Asking:
    """The peers that one process asks, and the command that starts it."""

    names: tuple[str, ...]
    command: Callable[[], list[str]]


class AbsentError(Exception):
    """A peer cannot be installed here; the message says why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel, for the platform and Python that it was built for, whichever run here."""

    name: str
    version: str
    sha256: str
    platform: str
    python: str = "3.12"

    def fetched(self) -> Path:
        """Return the wheel's file, which is fetched the first time. Raises `AbsentError`."""
        folder = WHEELS / self.sha256
        files = list(folder.glob("*.whl"))
        if files:
            return files[0]
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock.txt"
        lock.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        command = [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--platform", self.platform),
            *("--python-version", self.python, "--dest", str(folder), "-r", str(lock)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(folder.glob("*.whl"))
        if done.returncode or not files:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise AbsentError(errors[-1] if errors else f"pip ends with {done.returncode}")
        return files[0]


SGLANG = Wheel(
    "sglang",
    "0.5.23",
    "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6",
    "manylinux_2_34_x86_64",
)
LMCACHE = Wheel(
    "lmcache",
    "0.5.6",
    "c7892944ca91ec965c3448b2e30e0869f86a2499bdd01b70eb988e3436d71e4e",
    "manylinux_2_28_x86_64",
)


def _vllm() -> list[str]:
    python = os.environ.get("RESTOW_VLLM_PYTHON")
    if python is None:
        raise AbsentError("RESTOW_VLLM_PYTHON names no interpreter that has vLLM")
    return [python, "-m", "bench.peers.probes.vllm_peers"]


def _wheel(wheel: Wheel, module: str) -> list[str]:
    return [sys.executable, "-m", module, str(wheel.fetched()), wheel.version]


ASKED = (
    Asking(
        ("vLLM, NixlConnector", "vLLM, MooncakeConnector", "vLLM, MoRIIOConnector"),
        _vllm,
    ),
    Asking(("SGLang",), lambda: _wheel(SGLANG, "bench.peers.probes.sglang_peer")),
    Asking(("LMCache",), lambda: _wheel(LMCACHE, "bench.peers.probes.lmcache_peer")),
)


def ask(geometries: Sequence[Geometry], asked: Sequence[Asking] = ASKED) -> dict[str, Any]:
    """Ask all peers; return their versions and a row per geometry, as `page` reads them."""
    versions: dict[str, str] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    for asking in asked:
        try:
            for name, peer in _answers(asking, geometries).items():
                versions[name], answers[name] = peer["version"], peer["answers"]
        except AbsentError as absent:
            for name in asking.names:
                versions[name] = ""
                answers[name] = [{"how": "absent", "why": str(absent)}] * len(geometries)
    rows = [
        score_answers(geometry, {name: own[index] for name, own in answers.items()})
        for index, geometry in enumerate(geometries)
    ]
    return {"versions": versions, "rows": rows}


def _answers(asking: Asking, geometries: Sequence[Geometry]) -> dict[str, Any]:
    command = asking.command()
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "asked.json"), Path(folder, "answers.json")
        questions.write_text(json.dumps([geometry.message() for geometry in geometries]))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        done = subprocess.run(
            [*command, str(questions), str(answers)],
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode or not answers.exists():
            last = done.stderr.strip().splitlines()[-1:]
            raise AbsentError(last[0] if last else f"its process ends with {done.returncode}")
        by_peer: dict[str, Any] = json.loads(answers.read_text())
        return by_peer


def score_answers(geometry: Geometry, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Score the peers' answers, and Restow's plan between pages of every form that a peer has.

    The worst of Restow's scores is returned. Raises `FormError` if a peer's ranks hold something
    else than the layer's definition says.
    """
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
        both_pages = _pages(geometry, used)
        lengths = tuple(len(side_pages[0].ids) for side_pages in both_pages)
        if lengths != tuple(answer["page_bytes"]):
            raise FormError(
                f"{geometry}: {name} has pages of {answer['page_bytes']}, not {lengths}"
            )
        _check_channels(geometry, name, answer["channels"])
        cells[name] = _cell(score(*both_pages, [Copy(*copy) for copy in answer["copies"]]))
    scores = [score(*_pages(geometry, pair), restow_plan.copies(geometry, *pair)) for pair in forms]
    cells[RESTOW] = _cell(next((lossy for lossy in scores if not lossy.whole), scores[0]))
    return {"geometry": str(geometry), "cells": cells}


def _check_channels(
    geometry: Geometry, name: str, loaded: tuple[list[list[int]], list[list[int]]] | None
) -> None:
    """Raise `FormError` if a peer's weight loader gives a rank channels that are not its own."""
    kind = KINDS[geometry.kind]
    for tp, ranks in zip((geometry.p_tp, geometry.d_tp), loaded or (), strict=False):
        own = [kind.channels(tp, rank).tolist() for rank in range(tp)]
        if ranks != own:
            raise FormError(f"{geometry}: at TP {tp} ranks of {name} load other channels")


def _pages(geometry: Geometry, forms: tuple[Form, Form]) -> tuple[list[Page], list[Page]]:
    kind = KINDS[geometry.kind]
    return pages(kind, forms[0], geometry.p_tp), pages(kind, forms[1], geometry.d_tp)


def _cell(scored: Score) -> dict[str, Any]:
    return asdict(scored)
