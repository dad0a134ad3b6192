"""The broker is killed: how soon all that were connected are back."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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


def run(put: Yield, repeats: int) -> None:
    """10,000 agents of 1,250 engines, each with a connection of its own."""
    back: list[float] = []
    peak_bytes = 0
    broker, address = serve("127.0.0.1:0")
    with crowd(address):
        try:
            whole_at([address], CONNECT_S)
            for _ in range(min(repeats, 3)):
                killed_s = time.monotonic()
                broker.kill()
                broker.wait()
                broker, _ = serve(address)
                whole_at([address], CONNECT_S)
                back.append(time.monotonic() - killed_s)
                peak_bytes = max(peak_bytes, peak_bytes_of(broker.pid))
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


def whole_at(addresses: Sequence[str], within_s: float) -> str:
    """The broker that knows all of them, once one does."""
    began_s = time.monotonic()
    agents = dict[str, int]()
    with contextlib.ExitStack() as stack:
        admins = {one: stack.enter_context(AdminClient(one, timeout_s=30.0)) for one in addresses}
        while time.monotonic() - began_s < within_s:
            for address, admin in admins.items():
                with contextlib.suppress(RestowError):
                    status = admin.status()
                    agents[address] = status.agents
                    if (status.engines, status.agents) == (ENGINES, ENGINES * RANKS):
                        return address
            time.sleep(0.1)
    raise RuntimeError(f"after {within_s:g} s brokers know these numbers of agents: {agents}")


def peak_bytes_of(pid: int) -> int:
    """The most memory that a process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
