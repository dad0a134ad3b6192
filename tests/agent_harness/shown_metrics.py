"""Metrics that a process shows, beside what the operators' page and the dashboard say of them."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operators.md"
DASHBOARD = ROOT / "docker" / "grafana" / "restow.json"


def fetched(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def check_documented(text: str, prefix: str) -> None:
    """Check that page and dashboard have the metrics of a prefix, and no others."""
    there = {}
    for family in families(text):
        if family.name.startswith(prefix):
            labels = {name for sample in family.samples for name in sample.labels}
            kind = "info" if family.name.endswith("_agent_info") else family.type
            there[f"{family.name}_total" if kind == "counter" else family.name] = kind, labels
    rows = re.findall(rf"^\| `({prefix}\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    assert there == {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(rf"\b{prefix}\w+", target["expr"])
    }
    assert asked == {name for name, (kind, _) in there.items() if kind != "info"}
