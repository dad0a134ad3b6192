"""What the demo shows of a plan."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from restow.broker.families import ConvLayout, EngineSettings, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.planner import Strategy
from restow.demo.experiment import DemoOptions, Outcome
from restow.demo.main import routes
from restow.demo.recall.model import checkpoint_folder

COLUMN = {Strategy.SLICES: 3, Strategy.WHOLE: 4, Strategy.PACK: 5}
"""Of the table that is shown, counted from its left border."""


@pytest.mark.parametrize("strategy", COLUMN)
def test_rows_are_counted_whichever_way_they_travel(strategy: Strategy) -> None:
    p = EngineSettings(tp=2)
    d = EngineSettings(tp=4, conv_layout=ConvLayout.DS, page_tokens=8)
    options = DemoOptions(p, d, strategy=strategy)
    spec = model_from_hf_config(json.loads((checkpoint_folder() / "config.json").read_text()))
    outcome = Outcome((), {}, build_layout(spec, p), build_layout(spec, d))
    shown = io.StringIO()

    Console(file=shown, width=120).print(routes(options, outcome))

    lines = [line.split("│") for line in shown.getvalue().splitlines() if line.startswith("│")]
    assert len(lines) == d.tp
    for line in lines:
        assert int(line[COLUMN[strategy]]) > 0
