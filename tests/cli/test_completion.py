"""What a shell is told when somebody presses Tab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RESTOW = Path(sys.executable).with_name("restow")
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="NO BASH: completion was not tried in one")


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line, by the script that Restow installs."""
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
        env={**os.environ, "PATH": path},
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
