"""A decode engine in another language finds and takes a state by its content."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from agent_harness.processes import child
from cli.broker_process import broker_process
from contract_node.test_contract_node import HERE, WITHIN_S, packages, serve_daemon
from engines.test_examples import PROMPT, alone, begin

__all__ = ["packages"]
STEPS = 8


async def test_what_an_engine_in_python_holds_one_in_node_goes_on_from(
    tmp_path: Path, packages: Path
) -> None:
    daemon = str(tmp_path / "d.sock")
    with broker_process() as broker:
        holder = begin("by_content.py", "hold", "--tp", "4", "--broker", broker)
        words = {"broker": broker, "daemon": daemon, "prompt": PROMPT, "steps": STEPS}
        try:
            async with child(serve_daemon, broker, daemon), asyncio.timeout(WITHIN_S):
                node = await asyncio.create_subprocess_exec(
                    "node",
                    HERE / "by_content.js",
                    json.dumps(words),
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, "NODE_PATH": str(packages / "node_modules")},
                )
                said, _ = await node.communicate()
        finally:
            holder.send_signal(signal.SIGTERM)
            holder.communicate(timeout=30)
    assert json.loads(said) == {
        "holder": "holder",
        "held": 32,
        "state": "HANDOFF_STATE_DONE",
        "tokens": alone(PROMPT, STEPS),
    }
