"""What a store shows of itself: the page and the dashboard have what there is."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from broker.fakes import model_layout
from cli.broker_process import broker_process
from restow.agents.store.cli import COUNTERS, GAUGES, showing_store
from restow.agents.store.store import Store, StoreFigures, StoreOptions

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(restow_store_\w+)` \| (\w+) \|", re.MULTILINE)


def test_figures_are_shown_and_told_of() -> None:
    assert {*GAUGES, *COUNTERS} == {one.name for one in fields(StoreFigures)}
    with broker_process() as address:
        options = StoreOptions("store", address, 64 << 20)
        with (
            Store(model_layout(2), options) as store,
            showing_store("127.0.0.1:0", store) as shown,
            urllib.request.urlopen(f"http://{shown}/metrics", timeout=10) as answer,
        ):
            families = list(text_string_to_metric_families(answer.read().decode()))
            memory_bytes = store.figures.memory_bytes
    there, values = {}, {}
    for family in families:
        if family.name.startswith("restow_store_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            there[name] = family.type
            values[name] = family.samples[0].value
    assert values["restow_store_memory_bytes"] == memory_bytes
    assert "restow_agent_ranks_connected" in {family.name for family in families}
    page = (ROOT / "docs" / "operators.md").read_text()
    assert dict(ROW.findall(page)) == there
    board = json.loads((ROOT / "docker" / "grafana" / "restow.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\brestow_store_\w+", target["expr"])
    }
    assert asked == there.keys()
