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
NESTED = {name for name, whole in WHOLES.items() if whole.text in attention.MODELS}


def test_readme_names_every_type_that_has_more_than_attention() -> None:
    (row,) = re.findall(r"^\| configs \| (.*?) \(", (ROOT / "README.md").read_text(), re.M)
    known = {*MODELS, *WHOLES} - {*attention.MODELS, *NESTED}
    assert set(row.split(", ")) == {name.removesuffix("_text") for name in known}


def test_the_types_that_engines_hand_over_are_those_of_the_tests() -> None:
    section = LAYOUTS.split("### Handed over by real engines")[1].split("###")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    attending, recurrent = (set(re.findall(r"`(\w+)`", row)) for row in rows)
    assert attending == set(NUMBERS)
    assert recurrent == {*HYBRIDS, "nemotron_h"}


def test_hybrids_that_are_said_to_run_are_those_of_the_tests() -> None:
    section = LAYOUTS.split("### Hybrids and vLLM")[1]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    run = {name for row in rows if row[2].startswith(" run") for name in row[1].strip().split(", ")}
    assert run == {*HYBRIDS, "nemotron_h"}


def test_the_docs_name_every_type_with_attention_alone() -> None:
    known = {*attention.MODELS, *NESTED}
    said = {name for name in known if f"`{name}`" in LAYOUTS}
    assert {name for name in known - said if name.removesuffix("_text") not in NESTED} == set()
    assert f"with attention alone {len(known)} types" in (ROOT / "README.md").read_text()
