"""Which Restow this is: its release, and the commit that it is of.

All commits between two releases have one number. The commit is written down where a package is
built (`build_commit.py`) or an archive is made (git does, in ``commit.txt``); a checkout asks git.
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
    """As in ``0.1.0+g47fc4be1c2d3``; without a commit where nobody knows it."""
    commit = written_commit(FOLDER) or commit_of(FOLDER.parents[2])
    return f"{version('restow')}+g{commit[:COMMIT_CHARACTERS]}" if commit else version("restow")


def written_commit(folder: Path) -> str:
    """The commit that a build or an archive has written down; empty: none has."""
    for path in (folder / name for name in WRITTEN):
        if path.is_file() and _COMMIT.fullmatch(words := path.read_text().strip()):
            return words
    return ""


def commit_of(root: Path) -> str:
    """The commit of a checkout; empty where it is none, or there is no git."""
    git = shutil.which("git")
    # What is installed below somebody else's checkout is no part of that.
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
