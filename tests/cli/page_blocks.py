"""What a page shows as code, block by block, and a shell that runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forked.commands import begin_python

ROOT = Path(__file__).resolve().parents[2]
MADE = ("api.md", "python.md")
"""Pages that are made from the code: they show signatures, nothing to type."""
TYPED = (f"docs/{one.name}" for one in ROOT.glob("docs/*.md") if one.name not in MADE)
PAGES = ("README.md", "docker/README.md", *TYPED)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page."""

    page: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        """Return the first line that is no plain import, which names the block in its page."""
        lines = self.text.splitlines()
        return next(one for one in lines if one and not one.startswith("import "))

    @property
    def printed(self) -> list[str]:
        """Return what the block prints, according to its comments."""
        return re.findall(r"print\(.*\)  # (.+)$", self.text, re.MULTILINE)


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page, in their order."""
    return [Block(page, *one) for one in BLOCK.findall((ROOT / page).read_text())]


class Shell:
    """Runs blocks in a folder that is a checkout to them, with the commands of this interpreter."""

    def __init__(self, folder: Path, broker: str) -> None:
        """Prepare a shell; ``folder`` has the program `restow`, and keeps what blocks write."""
        self._folder, self._failed = folder / "checkout", folder / "failed"
        self._folder.mkdir()
        (self._folder / "docs").symlink_to(ROOT / "docs")
        (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / "python").chmod(0o755)
        # UCX tells of wires that come to nothing, among what is printed.
        quiet = {"COLUMNS": "100", "UCX_LOG_LEVEL": "fatal"}
        path = f"{folder}:{os.environ['PATH']}"
        self._env = os.environ | {"RESTOW_BROKER": broker, "PATH": path} | quiet

    def bash(self, block: Block) -> list[str]:
        """Run a block of bash, and return its commands that fail."""
        self._failed.write_text("")
        text = f"trap 'echo \"$BASH_COMMAND\" >>{self._failed}' ERR\n{block.text}true\n"
        subprocess.run(
            ["bash", "-uo", "pipefail", "-c", text],  # noqa: S607
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
        )
        return self._failed.read_text().splitlines()

    def python(self, block: Block, beside: str | None) -> list[str]:
        """Run a block of Python, and return the lines that it prints.

        Meanwhile the command ``beside`` is repeated until it succeeds.
        """
        with open(os.devnull) as stdin, tempfile.TemporaryFile("w+") as out:
            files = (stdin.fileno(), out.fileno(), 2)
            process = begin_python(block.text, files, self._env, self._folder)
            typed = ["bash", "-c", beside or "true"]
            while beside and process.is_alive():
                if subprocess.run(typed, env=self._env, check=False).returncode == 0:
                    break
            process.join(WAIT_S)
            process.kill()
            assert process.exitcode == 0, block.first_line
            out.seek(0)
            return out.read().splitlines()
