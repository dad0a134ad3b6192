"""Ask each connector, in a process of its own, which bytes it would copy, and judge the copies.

Nothing of a connector's package is imported into this process, so the package may belong to another
Python environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from restow.agents.conform import own_plan
from restow.agents.conform.rules import KINDS, Geometry
from restow.agents.conform.score import Copy, Form, Page, pages, score
from restow.broker.versions import own_version

OWN = "Restow"
UNJUDGED = "not judged"
VERDICTS = ("right", "wrong", "refused", "missed", "not asked", UNJUDGED)
UNSEEN = (
    "Functions are asked, and no engine runs: checks that an engine makes elsewhere are not seen.",
    "One layer with one page is asked about: padding, block tables, pipeline stages, prefixes and "
    "several layers are not.",
    "No byte travels: transports, races, fences, leases and failures are not seen.",
)
"""What a verdict does not say."""
TIMEOUT_S = 600


class ProbeError(Exception):
    """A connector cannot be asked here: it is not installed, or unlike what its probe knows."""


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector, the package that holds it, and what asks it: a module of `probes`, or a file."""

    name: str
    package: str
    probe: str = ""

    @classmethod
    def of_file(cls, path: Path) -> Connector:
        """Return the connector that a file of the user asks."""
        return cls(path.stem, path.name, str(path.resolve()))


CONNECTORS = (
    Connector("NixlConnector", "vllm", "vllm_nixl"),
    Connector("MooncakeConnector", "vllm", "vllm_mooncake"),
    Connector("MoRIIOConnector", "vllm", "vllm_moriio"),
    Connector("SGLang", "sglang", "sglang_slices"),
    Connector("LMCache", "lmcache", "lmcache_keys"),
    Connector(OWN, "restow"),
)


def judge(
    connectors: Sequence[Connector],
    geometries: Sequence[Geometry],
    python: str = sys.executable,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Ask connectors about geometries; return the report, as it is written as JSON.

    ``python`` is the interpreter of the environment that has the connectors' packages. Without
    geometries the report says which connectors can be asked. A connector is not judged where it is
    absent, or where its ranks hold something else than the rules say: no verdict would be true.
    """
    about: dict[str, dict[str, str]] = {}
    rows: list[dict[str, Any]] = [{"geometry": str(one), "cells": {}} for one in geometries]
    for connector in connectors:
        progress(f"asking {connector.name}")
        version, why = "", ""
        try:
            version, answers = _answers(connector, geometries, python)
        except ProbeError as error:
            why = str(error)
            answers = [{"verdict": UNJUDGED, "why": why}] * len(geometries)
        about[connector.name] = {"package": connector.package, "version": version, "absent": why}
        for geometry, row, answer in zip(geometries, rows, answers, strict=True):
            row["cells"][connector.name] = _cell(geometry, answer)
    counts = {name: dict(Counter(row["cells"][name]["verdict"] for row in rows)) for name in about}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "restow": own_version(),
        "connectors": about,
        "unseen": list(UNSEEN),
        "counts": counts,
        "rows": rows,
    }


def _answers(
    connector: Connector, geometries: Sequence[Geometry], python: str
) -> tuple[str, list[dict[str, Any]]]:
    """Return the package's version, and an answer for each geometry. Raises `ProbeError`."""
    if not connector.probe:
        return own_version(), [{} for _ in geometries]
    own = connector.probe in {known.probe for known in CONNECTORS}
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "questions.json"), Path(folder, "answers.json")
        questions.write_text(json.dumps([geometry.message() for geometry in geometries]))
        program = ["-m", f"probes.{connector.probe}"] if own else [connector.probe]
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        try:
            done = subprocess.run(  # noqa: S603 - the interpreter that the user names
                [python, *program, str(questions), str(answers)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
            if done.returncode == 0:
                found = json.loads(answers.read_text())
                return found["version"], found["answers"]
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            raise ProbeError(f"gives no answers: {error}") from None
    last = done.stderr.strip().splitlines()[-1:] or [f"it ends with {done.returncode}"]
    raise ProbeError(f"cannot be asked: {last[0]}")


def _cell(geometry: Geometry, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on an answer, with the share of each part that each rank has right."""
    if "verdict" in answer:
        return answer
    if not answer:
        return _own_cell(geometry)
    both = _pages(geometry, (Form(**answer["p_form"]), Form(**answer["d_form"])))
    lengths = [len(side[0].ids) for side in both]
    if lengths != list(answer["page_bytes"]):
        return {"verdict": UNJUDGED, "why": f"has pages of {answer['page_bytes']}, not {lengths}"}
    for tp, ranks in zip(
        (geometry.p_tp, geometry.d_tp), answer.get("channels") or (), strict=False
    ):
        if ranks != [KINDS[geometry.kind].channels(tp, rank).tolist() for rank in range(tp)]:
            return {"verdict": UNJUDGED, "why": f"at TP {tp} its ranks load other channels"}
    return _judged(both, [Copy(*copy) for copy in answer["copies"]])


def _own_cell(geometry: Geometry) -> dict[str, Any]:
    """Judge Restow's plan between pages of each form that engines have; return the worst."""
    kind = KINDS[geometry.kind]
    cells = []
    for conv, kv in (("DS", "HND"), ("SD", "NHD")):
        taps = 0 if kind.family == "gqa" else kind.taps
        forms = (
            Form(conv, taps + geometry.p_drafts, kv),
            Form(conv, taps + geometry.d_drafts, kv),
        )
        cells.append(_judged(_pages(geometry, forms), own_plan.copies(geometry, *forms)))
    return next((cell for cell in cells if cell["verdict"] == "wrong"), cells[0])


def _pages(geometry: Geometry, forms: tuple[Form, Form]) -> tuple[list[Page], list[Page]]:
    kind = KINDS[geometry.kind]
    return pages(kind, forms[0], geometry.p_tp), pages(kind, forms[1], geometry.d_tp)


def _judged(both: tuple[list[Page], list[Page]], copies: Sequence[Copy]) -> dict[str, Any]:
    scored = score(*both, copies)
    return {"verdict": "right" if scored.whole else "wrong", **asdict(scored)}
