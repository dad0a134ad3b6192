"""Brokers and other servers as processes, whose logs go to files and not between a bench's rows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

BROKER = (sys.executable, "-m", "restow.broker.cli.main", "serve")
ANY_PORT = "127.0.0.1:0"


def logs_folder() -> Path:
    """Return the folder of this run's logs."""
    folder = Path(tempfile.gettempdir()) / f"restow-bench-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def open_log(name: str) -> BinaryIO:
    """Open the log of all processes called ``name``, to be written at its end."""
    return (logs_folder() / f"{name}.log").open("ab")


def module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of the benchmarks as a process."""
    return (sys.executable, "-m", name)


@contextlib.contextmanager
def running(command: Sequence[str], log: str) -> Iterator[str]:
    """Run a server; yield the address that it prints when it listens."""
    process, address = _listening(command, log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def _listening(command: Sequence[str], log: str) -> tuple[subprocess.Popen[str], str]:
    with open_log(log) as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        line = process.stdout.readline() if process.stdout else ""
        if "listening on" not in line:
            process.kill()
            process.wait()
            raise RuntimeError(f"{' '.join(command)} did not start: see {file.name}")
    return process, line.split()[-1]


class Broker:
    """A `restow serve` process, which can be killed and started again at its address."""

    def __init__(self, options: Sequence[str] = (), command: Sequence[str] = BROKER) -> None:
        self._command, self._options = tuple(command), tuple(options)
        self._process, self.address = self._start(ANY_PORT)

    def _start(self, listen: str) -> tuple[subprocess.Popen[str], str]:
        return _listening([*self._command, "--listen", listen, *self._options], "broker")

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process with -9."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start the process again at the same address, and wait until it listens."""
        self._process, _ = self._start(self.address)


@contextlib.contextmanager
def running_broker(*options: str, command: Sequence[str] = BROKER) -> Iterator[Broker]:
    """Run a broker on loopback with further options of `restow serve`; kill it at the end."""
    broker = Broker(options, command)
    try:
        yield broker
    finally:
        broker.kill()


def cpu_seconds_of(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes_of(pid: int) -> int:
    """Return the largest resident size that a process ever had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0
