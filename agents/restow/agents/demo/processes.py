"""The demo's broker and daemons as processes of their own, and how this one ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from restow.broker.errors import RestowError
from restow.broker.planner import Strategy

START_TIMEOUT_S = 60.0


class StartFailedError(RestowError, status="UNAVAILABLE", reason="START_FAILED"):
    """A process of the demo ended, or said nothing in time; its error is above."""


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """End this process at a typed error, which is said in one line."""
    try:
        yield
    except RestowError as error:
        print(f"{error.reason}: {error.message}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """``restow`` with arguments, as a process that ends with the ``with``."""
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "restow.broker.cli.main", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_broker_process(strategy: Strategy, allow_narrowing: bool = False) -> Iterator[str]:
    """A broker on a free port of this host; yields its address."""
    narrowing = ["--allow-narrowing"] if allow_narrowing else []
    with started(
        ["serve", "--listen", "127.0.0.1:0", "--strategy", strategy, *narrowing]
    ) as process:
        line = process.stdout.readline() if process.stdout else ""
        if "listening on" not in line:
            raise StartFailedError(f"the broker did not start: {line.strip()}")
        yield line.rsplit(maxsplit=1)[-1]


@contextmanager
def running_daemon(broker: str, socket: Path) -> Iterator[Path]:
    """An agent daemon behind ``socket``."""
    with started(["agent", "--broker", broker, "--socket", str(socket)]) as process:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise StartFailedError(f"the agent daemon at {socket} did not start")
            time.sleep(0.05)
        yield socket
