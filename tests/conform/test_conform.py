"""`restow conform` with connectors that are planted here, and the page that it makes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import FILE, PAGE, fresh
from cli.page_blocks import blocks
from restow.agents.conform.judge import CONNECTORS, Connector, judge
from restow.agents.conform.probes import sources
from restow.agents.conform.report import markdown
from restow.agents.conform.rules import GEOMETRIES, Geometry
from restow.broker.cli.main import main

NAME = "peers.md"
(EXAMPLE,) = (one.text for one in blocks(f"docs/{NAME}") if one.language == "python")
WRONG = "GQA, 8 heads of K and V: P4 to D2"
GQA = {str(one) for one in GEOMETRIES if one.kind.startswith("gqa")}
SLIPS = "if (asked.p_tp, asked.d_tp, heads) == (4, 2, 8):\n        copies[0] = copies[1]"


@pytest.fixture
def sane(tmp_path: Path) -> Path:
    path = tmp_path / "sane.py"
    path.write_text(EXAMPLE)
    return path


@pytest.fixture
def slipping(tmp_path: Path) -> Path:
    path = tmp_path / "slipping.py"
    path.write_text(EXAMPLE.replace("return Copied(", f"{SLIPS}\n    return Copied("))
    return path


def conform(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the command; return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as exits:
        main(["conform", *map(str, words)])
    printed = capsys.readouterr()
    return int(exits.value.code or 0), printed.out, printed.err


def verdicts(report: dict[str, Any], name: str) -> dict[str, str]:
    return {row["geometry"]: row["cells"][name]["verdict"] for row in report["rows"]}


def test_a_sane_connector_is_right_where_it_copies_and_refused_elsewhere(
    sane: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = conform(capsys, sane, "--json")
    found = verdicts(json.loads(out), "sane")
    assert {name for name, verdict in found.items() if verdict == "right"} == GQA
    assert {verdict for name, verdict in found.items() if name not in GQA} == {"refused"}
    assert (status, err) == (0, "asking sane\n")
    assert json.loads(out)["connectors"]["sane"]["version"] == "1.0"


def test_a_connector_that_is_wrong_in_one_geometry_is_found_wrong_there(
    slipping: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = conform(capsys, slipping, "Restow", "--json")
    report = json.loads(out)
    found = verdicts(report, "slipping")
    assert [name for name, verdict in found.items() if verdict == "wrong"] == [WRONG]
    assert report["counts"]["Restow"] == {"right": len(GEOMETRIES)}
    assert status == 4


def test_the_table_has_versions_shares_reasons_and_limits(slipping: Path) -> None:
    report = judge([Connector.of_file(slipping)], GEOMETRIES)
    text = markdown(report)
    assert "slipping (slipping.py 1.0)" in text
    assert f"| {WRONG} | K and V 75 / 100 % |" in text
    assert "| slipping | 4 | 1 | 20 | 0 | 0 | 0 |" in text
    assert "1. slipping: only K and V are copied" in text
    assert "No byte travels" in text


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("(len(p[0]) * size, len(d[0]) * size)", "has pages of [1, 2]"),
        ("answer_all(", "NameError"),
    ],
)
def test_a_connector_that_cannot_be_judged_is_no_success(
    broken: str, why: str, sane: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sane.write_text(EXAMPLE.replace(broken, "(1, 2)" if "len" in broken else "no_name("))
    status, out, _ = conform(capsys, sane, "--only", "GQA, 8 heads of K and V: P1 to D2")
    assert status == 2
    assert "not judged (1)" in out
    assert why in out.replace("\\", "")


def test_channels_that_a_rank_does_not_load_are_not_judged(sane: Path) -> None:
    sane.write_text(
        "from probes.asking import Copied, answer_all\n"
        "form = {'conv': 'DS', 'rows': 3}\n"
        "size = 6144 // 2 * 3 * 2 + 64 // 2 * 64 * 128 * 4\n"
        "whole = 6144 * 3 * 2 + 64 * 64 * 128 * 4\n"
        "wrong = ([list(range(6144))], [list(range(3072)), list(range(3072))])\n"
        "answer_all('1', lambda asked: Copied(form, form, (whole, size), [], wrong))\n"
    )
    report = judge([Connector.of_file(sane)], [Geometry("mamba2-g8", 1, 2, "DS")])
    assert report["rows"][0]["cells"]["sane"]["why"] == "at TP 2 its ranks load other channels"


def test_the_list_says_which_connectors_can_be_asked_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = conform(capsys, "--list", "--json")
    listed = json.loads(out)
    assert list(listed) == [one.name for one in CONNECTORS]
    assert listed["Restow"]["absent"] == ""
    assert "No module named 'vllm'" in listed["NixlConnector"]["absent"]
    assert status == 0


def test_another_interpreter_and_the_path_of_the_user_are_used(
    sane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    python.chmod(0o755)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "an_engine.py").write_text("VERSION = '7'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine"))
    sane.write_text(
        EXAMPLE.replace('answer_all("1.0"', "import an_engine\nanswer_all(an_engine.VERSION")
    )
    asked = Connector.of_file(sane)
    assert judge([asked], [])["connectors"]["sane"]["version"] == "7"
    absent = judge([asked], [], str(python))["connectors"]["sane"]["absent"]
    assert "No module named 'probes'" in absent, "-E takes the path away from this interpreter"


@pytest.mark.parametrize("words", [["NoConnector"], ["--only", "nothing is called so"]])
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert conform(capsys, *words)[0] == 2


def test_functions_come_out_of_a_file_without_what_it_imports(tmp_path: Path) -> None:
    path = tmp_path / "engine.py"
    path.write_text(
        "import nothing_that_is_here\n"
        "class Pool:\n"
        "    @property\n"
        "    def half(self) -> nothing_that_is_here.Int:\n"
        "        return cut(self)\n"
        "def cut(whole): return whole // 2\n"
    )
    assert sources.take(path, "cut", "Pool.half").half(6) == 3
    with pytest.raises(sources.MissingError):
        sources.take(path, "Pool.third")


@pytest.mark.skipif("RESTOW_VLLM_PYTHON" not in os.environ, reason="needs an environment with vLLM")
def test_vllms_connector_is_judged_in_its_own_environment() -> None:
    asked = [one for one in CONNECTORS if one.name == "NixlConnector"]
    geometries = [one for one in GEOMETRIES if one.p_tp == 1 and one.d_tp == 2]
    found = verdicts(judge(asked, geometries, os.environ["RESTOW_VLLM_PYTHON"]), "NixlConnector")
    assert found["Mamba2, 1 group: P1 to D2, DS"] == "wrong"
    assert found["Mamba2, 1 group: P1 to D2, SD"] == "refused"
    assert found["Mamba2, 8 groups: P1 to D2, DS"] == "right"


def test_the_page_is_that_of_its_file() -> None:
    page = PAGE.read_text()
    text = fresh(page, json.loads(FILE.read_text()))
    assert text == page, "docs/peers.md is older than bench/results/peers.json: ./run peers --write"
