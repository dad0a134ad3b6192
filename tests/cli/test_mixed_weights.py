"""Weights that are rolled out are told of: which engine serves which revision."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from typer.testing import CliRunner

from broker.fakes import broker, model_layout
from restow.broker.cli.main import app
from restow.broker.client import EngineSession
from restow.broker.layout import Layout


def of(revision: str, adapter: str = "") -> Layout:
    layout = model_layout(2)
    return replace(layout, model=replace(layout.model, revision=revision, adapter=adapter))


async def shown(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


async def test_a_rolling_update_is_told_by_status_and_engines() -> None:
    async with broker() as running:
        where = ("--broker", running.address)
        async with (
            EngineSession("d1", "life", of("v1"), running.address),
            EngineSession("p1", "life", of("v1"), running.address),
        ):
            for command in ("status", "engines"):
                assert "weights" not in await shown(command, *where)
            async with (
                EngineSession("p2", "life", of("v2"), running.address),
                EngineSession("p3", "life", of("", "lora"), running.address),
            ):
                words = (
                    "p3 of no revision lora; d1, p1 of v1; p2 of v2: nothing is handed over "
                    "between these"
                )
                assert f"weights {of('').model.name}: {words}" in await shown("status", *where)
                name = of("").model.name
                assert f"Mixed weights: {name}: {words}" in await shown("engines", *where)
                told = json.loads(await shown("status", "--json", *where))["models"]
                assert [(one["revision"], one["engines"]) for one in told] == [
                    ("", ["p3"]),
                    ("v1", ["d1", "p1"]),
                    ("v2", ["p2"]),
                ]
