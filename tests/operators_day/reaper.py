"""Ends all that works in a folder, when who started it has ended, however that ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def end_all(folder: Path) -> None:
    """Kill every process whose working folder this is."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink() == folder:
                os.kill(int(process.name), signal.SIGKILL)


def main() -> None:
    """Wait for the end of stdin, which the starter holds open."""
    sys.stdin.read()
    end_all(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
