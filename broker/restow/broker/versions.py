"""The version of Restow: its release and its commit.

All commits between two releases have the same version number. A package records its commit when it
is built (`build_commit.py`), an archive when git makes it (``commit.txt``); a checkout asks git.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
WRITTEN = ("built_commit.txt", "commit.txt")
COMMIT_CHARACTERS = 12
_COMMIT = re.compile(r"[0-9a-f]{7,}")
ASK_S = 5.0


@cache
def own_version() -> str:
    """Return the version, as in ``0.2.0+g47fc4be1c2d3``; without a commit if that is unknown."""
    commit = written_commit(FOLDER) or commit_of(FOLDER.parents[2])
    return f"{version('restow')}+g{commit[:COMMIT_CHARACTERS]}" if commit else version("restow")


def written_commit(folder: Path) -> str:
    """Return the commit recorded by a build or an archive; empty if none is recorded."""
    for path in (folder / name for name in WRITTEN):
        if path.is_file() and _COMMIT.fullmatch(words := path.read_text().strip()):
            return words
    return ""


def commit_of(root: Path) -> str:
    """Return the commit of a checkout; empty if ``root`` is not a checkout, or git is missing."""
    git = shutil.which("git")
    # A package installed inside another project's checkout does not belong to that checkout.
    if git is None or not (root / ".git").exists() or not (root / "broker" / "restow").is_dir():
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - a program of the system's
            [git, "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if _COMMIT.fullmatch(done.stdout.strip()) else ""
