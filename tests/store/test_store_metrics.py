"""What a store shows of itself: the page and the dashboard have what there is."""

from __future__ import annotations

from dataclasses import fields

from agent_harness.shown_metrics import check_documented, families, fetched
from broker.fakes import model_layout
from cli.broker_process import broker_process
from restow.agents.store.cli import COUNTERS, GAUGES, showing_store
from restow.agents.store.store import Store, StoreFigures, StoreOptions


def test_figures_are_shown_and_told_of() -> None:
    assert {*GAUGES, *COUNTERS} == {one.name for one in fields(StoreFigures)}
    with broker_process() as address:
        options = StoreOptions("store", address, 64 << 20)
        with Store(model_layout(2), options) as store, showing_store("127.0.0.1:0", store) as shown:
            text, memory_bytes = fetched(shown), store.figures.memory_bytes
    values = {family.name: family.samples[0].value for family in families(text) if family.samples}
    assert values["restow_store_memory_bytes"] == memory_bytes
    assert "restow_agent_ranks_connected" in values
    check_documented(text, "restow_store_")
