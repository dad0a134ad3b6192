"""What a shell is told when somebody presses Tab."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.fakes import broker, pair

RESTOW = Path(sys.executable).with_name("restow")
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="NO BASH: completion was not tried in one")


def completed(line: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Return what bash offers for the last word of a line, by the script that Restow installs."""
    assert BASH is not None
    words = line.split(" ")
    script = f"""
      eval "$({RESTOW} --show-completion bash)"
      COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}
      $(complete -p restow | sed 's/.*-F \\([^ ]*\\).*/\\1/') restow
      printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{RESTOW.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [BASH, "-c", script],
        env={**os.environ, "PATH": path, **(env or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_commands_and_options() -> None:
    assert completed("restow doc") == ["doctor"]
    assert {"handoff", "handoffs"} <= set(completed("restow hand"))
    assert "--pair" in completed("restow doctor --p")
    assert completed("restow nothing-like-it") == []


async def test_words_that_the_broker_knows() -> None:
    async with broker() as running, pair(running.address, 1, 1) as both:
        for name in ("request-1", "request-2", "other"):
            await both.hand_over(name)
        env = {"RESTOW_BROKER": running.address}

        async def offered(line: str, env: dict[str, str] = env) -> list[str]:
            return sorted(await asyncio.to_thread(completed, line, env))

        assert await offered("restow handoff req") == ["request-1", "request-2"]
        assert await offered("restow engines p") == ["p"]
        assert await offered("restow doctor --pair p") == ["p:d"]
        assert await offered("restow reasons lease_") == ["lease_expired", "lease_too_short"]
        address = f"--broker {running.address}"
        assert await offered(f"restow handoff {address} ot", {}) == ["other"]
        # Of a broker that is not there, nothing is offered and nothing is said.
        assert await offered("restow handoff --broker 127.0.0.1:1 req", {}) == []
