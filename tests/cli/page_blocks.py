"""What a page shows as code, block by block, and a shell that runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
        """Return the first line that is no import, which names the block in its page.

        All examples begin with imports.
        """
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
        """Prepare a shell in ``folder``, which is empty; what blocks write stays there."""
        self._folder = folder / "checkout"
        self._folder.mkdir()
        (self._folder / "docs").symlink_to(ROOT / "docs")
        programs = folder / "bin"
        programs.mkdir()
        for name, words in (("restow", " -m restow.broker.cli.main"), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
            program.chmod(0o755)
        # UCX tells of wires that come to nothing, among what is printed.
        quiet = {"COLUMNS": "100", "UCX_LOG_LEVEL": "fatal"}
        self._env = os.environ | {"RESTOW_BROKER": broker} | quiet
        self._env["PATH"] = f"{programs}:{os.environ['PATH']}"

    def run(self, block: Block, beside: str) -> tuple[str, list[str]]:
        """Run a block; return what it prints, and its commands that fail.

        Meanwhile the command ``beside`` is repeated until it succeeds.
        """
        failed = self._folder.parent / "failed"
        failed.write_text("")
        text = f"trap 'echo \"$BASH_COMMAND\" >>{failed}' ERR\n{block.text}true\n"
        process = subprocess.Popen(
            [sys.executable, "-c", block.text]
            if block.language == "python"
            else ["bash", "-uo", "pipefail", "-c", text],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while beside and process.poll() is None:
            if subprocess.run(["bash", "-c", beside], env=self._env, check=False).returncode == 0:  # noqa: S607
                break
        try:
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert process.returncode == 0, f"{block.page}: {block.first_line}\n{err}"
        return out, failed.read_text().splitlines()
