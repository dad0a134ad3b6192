"""Who else on this host may read or write a file, as its mode says."""

from __future__ import annotations

import stat
from pathlib import Path

from restow.broker.errors import RestowError

READABLE = "every user of this host may read a secret"
READ_STEP = "chmod o-r FILE, and make the secret anew: others may have it"


def refuse_writable(what: str, path: Path, error: type[RestowError]) -> None:
    """Raise ``error`` if every user may write the file: then it proves nothing.

    What can't be looked at is told by whoever reads it.
    """
    if _mode(path) & stat.S_IWOTH:
        raise error(
            f"{what} {path} can be written by every user of this host, so it proves nothing: "
            f"`chmod o-w {path}`, and see whether it is still what you wrote",
            file=path,
        )


def is_readable_by_all(path: Path) -> bool:
    """Whether every user may read it."""
    return bool(_mode(path) & stat.S_IROTH)


def _mode(path: Path) -> int:
    try:
        found = path.stat().st_mode
    except OSError:
        return 0
    return found if stat.S_ISREG(found) else 0
