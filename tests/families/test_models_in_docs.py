"""What README and docs say of models is what `families` reads and what tests run."""

from __future__ import annotations

import re
from pathlib import Path

from restow.broker.families.hf import attention
from restow.broker.families.hf.config import MODELS, WHOLES
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.tiny_models import NUMBERS

ROOT = Path(__file__).parents[2]
LAYOUTS = (ROOT / "docs" / "layouts.md").read_text()


def test_readme_names_every_type_that_has_more_than_attention() -> None:
    (row,) = re.findall(r"^\| configs \| (.*?) \(", (ROOT / "README.md").read_text(), re.M)
    nested = {name for name, whole in WHOLES.items() if whole.text in attention.MODELS}
    known = {*MODELS, *WHOLES} - {*attention.MODELS, *nested}
    assert set(row.split(", ")) == {name.removesuffix("_text") for name in known}


def test_the_types_that_engines_hand_over_are_those_of_the_tests() -> None:
    section = LAYOUTS.split("### Handed over by real engines")[1].split("###")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    attention, recurrent = (set(re.findall(r"`(\w+)`", row)) for row in rows)
    assert attention == set(NUMBERS)
    assert recurrent == {*HYBRIDS, "nemotron_h"}


def test_hybrids_that_are_said_to_run_are_those_of_the_tests() -> None:
    section = LAYOUTS.split("### Hybrids and vLLM")[1]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    run = {name for row in rows if row[2].startswith(" run") for name in row[1].strip().split(", ")}
    assert run == {*HYBRIDS, "nemotron_h"}
