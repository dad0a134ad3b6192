"""What a package is built with: the commit that it is of, which nothing in it would tell otherwise.

RESTOW_COMMIT names it where there is no git, as in an image; a source distribution has it already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "restow/broker/built_commit.txt"


class CommitHook(BuildHookInterface[Any]):
    """Adds a file with the commit."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write it, unless the package stays where it is: then git is asked."""
        commit = os.environ.get("RESTOW_COMMIT") or _commit_of(Path(self.root))
        if version == "editable" or not commit:
            return
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write(commit + "\n")
        self._path = Path(file.name)
        self._path.chmod(0o644)
        folder = "broker/" if self.target_name == "sdist" else ""
        build_data["force_include"][file.name] = folder + NAME

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if hasattr(self, "_path"):
            self._path.unlink()


def _commit_of(root: Path) -> str:
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    command = [git, "-C", str(root), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()
