"""Signals to processes that may be gone already."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

STOPPED_WITHIN_S = 20.0
_STILL = "TtZX"
"""States of a thread, as ``/proc`` has them, in which it runs no more."""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, to whatever process has the number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop(pid: int) -> None:
    """Stop a process, and return when none of its threads runs.

    On busy processors some threads run on for a while after SIGSTOP was sent.
    """
    send(pid, signal.SIGSTOP)
    due_s = time.monotonic() + STOPPED_WITHIN_S
    while any(state not in _STILL for state in _states(pid)):
        if time.monotonic() > due_s:
            raise TimeoutError(f"process {pid} runs on after SIGSTOP")
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """Return the states of all threads of a process, or none if the process is gone."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return found
