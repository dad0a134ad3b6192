"""A process that was forked too late is told so by everything that it might use."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from agent_harness import forking
from broker.fakes import broker


async def test_everything_public_says_that_it_does_not_go_with_a_fork(tmp_path: Path) -> None:
    async with broker() as running:
        command = [sys.executable, forking.__file__, running.address, str(tmp_path / "socket")]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("the parent") == "DECLINED"
    assert found == dict.fromkeys(found, "FORKED")
    assert len(found) > 20
