"""The broker is killed: how soon all that were connected are back."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from crowd import RANKS
from rows import Yield, compared

from restow.broker.client.admin import AdminClient
from restow.broker.errors import RestowError

SERVE = [sys.executable, "-m", "restow.broker.cli.main", "serve", "--listen"]
# The broker has its own machine in life, so theirs shall not take the processors from it.
CROWD = ["nice", "-n", "15", sys.executable, str(Path(__file__).with_name("crowd.py"))]
ENGINES = 1250
PROCESSES = 5
CONNECT_S = 300.0
BACK_GOAL_S = 30.0
MEMORY_GOAL_BYTES = 2e9


def run(put: Yield, repeats: int) -> None:
    """10,000 agents of 1,250 engines, each with a connection of its own."""
    back: list[float] = []
    peak_bytes = 0
    broker, address = serve("127.0.0.1:0")
    with crowd(address):
        try:
            _whole_after(address, CONNECT_S)
            for _ in range(min(repeats, 3)):
                killed_s = time.monotonic()
                broker.kill()
                broker.wait()
                broker, _ = serve(address)
                _whole_after(address, CONNECT_S)
                back.append(time.monotonic() - killed_s)
                peak_bytes = max(peak_bytes, _peak_bytes(broker.pid))
        finally:
            broker.kill()
            broker.wait()
    agents = ENGINES * RANKS
    note = f"{agents} agents, {ENGINES} sessions; broker {peak_bytes / 1e9:.2f} GB at its peak"
    put(
        compared(
            "restarts",
            "all agents back after kill -9 of the broker",
            back,
            f"budget of {BACK_GOAL_S:g} s",
            [BACK_GOAL_S],
            goal=1.0,
            note=note,
        )
    )


@contextlib.contextmanager
def crowd(address: str) -> Iterator[None]:
    """Their processes."""
    share = ENGINES // PROCESSES
    started = [
        subprocess.Popen([*CROWD, address, str(number * share), str(share)])
        for number in range(PROCESSES)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def serve(listen: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A broker of its own, once it listens, and its address."""
    process = subprocess.Popen([*SERVE, listen, *options], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline() if process.stdout else ""
    if "listening on" not in line:
        raise RuntimeError(f"no broker listens on {listen}")
    return process, line.split()[-1]


def _whole_after(address: str, within_s: float) -> None:
    """Wait until the broker knows all of them."""
    began_s = time.monotonic()
    with AdminClient(address, timeout_s=30.0) as admin:
        while time.monotonic() - began_s < within_s:
            with contextlib.suppress(RestowError):
                status = admin.status()
                if (status.engines, status.agents) == (ENGINES, ENGINES * RANKS):
                    return
            time.sleep(0.1)
    raise RuntimeError(f"after {within_s:g} s the broker knows {status.agents} agents")


def _peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
