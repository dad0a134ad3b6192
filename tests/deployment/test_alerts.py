"""The alerts ask for metrics that a broker shows, say what to do, and fire when they should."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from broker.certificates import Authority
from broker.fakes import broker, pair
from broker.guarded import guarded
from restow.broker.reasons import ORDINARY

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = 77
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yaml"
[GROUP] = yaml.safe_load(ALERTS.read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {one["alert"]: one for one in GROUP["rules"]}


def selected(expression: str) -> dict[str, set[str]]:
    """Return the metrics that an expression selects, and the labels that it selects them by."""
    found: dict[str, set[str]] = {}

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector) and node.name:
            labels = found.setdefault(node.name, set())
            labels.update(one.name for one in node.matchers.matchers)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


async def shown(tmp_path: Path) -> dict[str, set[str]]:
    """Return the metrics of a broker after a handoff and of a broker with TLS, with labels."""

    def ask(address: str | None) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    port = "127.0.0.1:0"
    async with broker(http_listen=port) as running, pair(running.address, 1, 1) as both:
        await both.hand_over("one")
        pages = [await asyncio.to_thread(ask, running.http_address)]
    async with guarded(Authority(tmp_path), http_listen=port) as running:
        pages.append(await asyncio.to_thread(ask, running.http_address))
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_alerts_ask_for_what_a_broker_shows(tmp_path: Path) -> None:
    there = await shown(tmp_path)
    for name, rule in RULES.items():
        asked = selected(rule["expr"])
        assert asked, name
        for metric, labels in asked.items():
            assert metric in there, f"{name} asks for {metric}"
            assert labels <= there.get(metric, set()), f"{name}: {metric} has no {labels}"


def test_no_ordinary_end_is_counted_as_a_failure() -> None:
    rule = RULES["RestowHandoffsFail"]["expr"]
    left_out = [set(one.split("|")) for one in re.findall(r'reason!~"([A-Z_|]+)"', rule)]
    assert left_out == [set(ORDINARY)] * 2
    page = (ROOT / "docs" / "runbook.md").read_text()
    _, _, section = page.partition("### RestowHandoffsFail\n")
    named = set(re.findall(r"`([A-Z_]+)`", section.partition("###")[0]))
    assert named == ORDINARY


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selected("sum(rate(restow_engines[5m])")


def test_who_is_woken_reads_what_it_is_and_what_to_do() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    headings = {one.lower() for one in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    links = set()
    for name, rule in RULES.items():
        assert re.fullmatch(r"\d+[mh]", rule["for"]), name
        assert rule["labels"]["severity"] in {"critical", "warning"}, name
        assert rule["annotations"].keys() == {"summary", "runbook_url"}, name
        file, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert (file, heading) == ("docs/runbook.md", name.lower())
        links.add(heading)
    assert links == headings


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return Prometheus' own judge of alerts. Skips, with the reason, where it can't be had."""
    if (found := shutil.which("promtool")) is not None:
        return found
    bring = ROOT / "tests" / "debian_program.sh"
    done = subprocess.run(
        [bring, "prometheus", "usr/bin/promtool"], capture_output=True, text=True, check=False
    )
    if done.returncode == LEFT_OUT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    *_, program = done.stdout.splitlines()
    return program


def test_alerts_fire_when_they_should(promtool: str) -> None:
    for arguments in (["check", "rules", ALERTS], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
