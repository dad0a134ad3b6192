"""A broker as a process of its own, as operators run it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

LINE = "restow broker listening on "


@contextlib.contextmanager
def broker_process(*options: str) -> Iterator[str]:
    """Run ``restow serve`` on a free port of this machine; yields its address."""
    command = [sys.executable, "-m", "restow.broker.cli.main", "serve"]
    command += ["--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(LINE), line
        yield line.removeprefix(LINE).strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def path_of_python() -> dict[str, str]:
    """Return the PYTHONPATH under which these tests run, if it is set.

    It names the tested code where that is not the installed code.
    """
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def run_restow(
    *arguments: str, env: dict[str, str] | None = None, columns: int = 80
) -> subprocess.CompletedProcess[str]:
    """Run a command; return what a terminal of ``columns`` columns would show."""
    command: Sequence[str] = [sys.executable, "-m", "restow.broker.cli.main", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"COLUMNS": str(columns), "PATH": "/usr/bin:/bin", **path_of_python(), **(env or {})},
    )
