"""What a shell is told when somebody presses Tab."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.fakes import broker, pair
from restow.broker.cli.main import app

RESTOW = Path(sys.executable).with_name("restow")
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="NO BASH: completion was not tried in one")
def test_the_script_that_restow_installs_completes_in_bash() -> None:
    script = f"""
      eval "$({RESTOW} --show-completion bash)"
      COMP_WORDS=(restow doc); COMP_CWORD=1
      $(complete -p restow | sed 's/.*-F \\([^ ]*\\).*/\\1/') restow
      printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    env = {**os.environ, "PATH": f"{RESTOW.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(BASH), "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["doctor"]


def offered(line: str, **env: str) -> list[str]:
    """Return what the script of bash is told for the last word of a line."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    runner = CliRunner(env={"_RESTOW" + "_COMPLETE": "complete_bash", **asked, **env})
    return sorted(runner.invoke(app, prog_name="restow").stdout.split())


def test_commands_and_options() -> None:
    assert {"handoff", "handoffs"} <= set(offered("restow hand"))
    assert "--pair" in offered("restow doctor --p")
    assert offered("restow nothing-like-it") == []
    assert offered("restow reasons lease_") == ["lease_expired", "lease_too_short"]


async def test_words_that_the_broker_knows() -> None:
    async with broker() as running, pair(running.address, 1, 1) as both:
        for name in ("request-1", "request-2", "other"):
            await both.hand_over(name)
        address = f"--broker {running.address}"
        for line, words in (
            ("restow handoff req", ["request-1", "request-2"]),
            ("restow engines p", ["p"]),
            ("restow doctor --pair p", ["p:d"]),
            ("restow engines --tenant def", ["default"]),
        ):
            known = {"RESTOW_BROKER": running.address}
            assert await asyncio.to_thread(offered, line, **known) == words
        assert await asyncio.to_thread(offered, f"restow handoff {address} ot") == ["other"]
    # Of a broker that is not there, nothing is offered and nothing is said.
    assert offered("restow handoff --broker 127.0.0.1:1 req") == []
