"""A page that is what a shell printed: an operator's day is typed anew, act by act."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import sample
from types import TracebackType

from forked.commands import restow_program

_END = "end-of-this-command"
_AGAIN_S = 0.5
_LINES, _COLUMNS = 40, 100
_REAPER = """
import contextlib, os, pathlib, signal, sys
sys.stdin.read()  # the shell's process holds it open until it ends, however it ends
for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        if (process / "cwd").readlink() == pathlib.Path(sys.argv[1]):
            os.kill(int(process.name), signal.SIGKILL)
"""
"""Ends every process that works in a folder."""


class UnexpectedOutputError(Exception):
    """A command did not print what it should have, or not in time."""


class Shell:
    """One bash, with jobs in the background; remembers all that was typed and printed."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        ports: Mapping[int, int],
        programs: Mapping[str, str],
        longest_s: float = 120.0,
    ) -> None:
        """Start a shell in ``folder``; ``ports`` says what stands for a port of the page.

        ``programs`` are commands of a shell, by the names that they are typed by. A command may
        take ``longest_s``, and so long is looked for what one is to print.
        """
        self.text = ""
        self._longest_s = longest_s
        self._ports = dict(ports)
        tools = folder / "bin"
        tools.mkdir()
        python = f'exec "{sys.executable}" "$@"\n'
        for name, words in (
            ("restow", python.replace('"$@"', '-m restow.broker.cli.main "$@"')),
            ("python", python),
            *programs.items(),
        ):
            (tools / name).write_text(f"#!/bin/sh\n{words}")
            (tools / name).chmod(0o755)
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", _REAPER, str(folder.resolve())],
            stdin=subprocess.PIPE,
            cwd="/",
        )
        self._screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (_LINES, _COLUMNS))
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],  # noqa: S607
            cwd=folder,
            env={
                **environment,
                "PATH": f"{tools}:{os.environ['PATH']}",
                "TERM": "dumb",
                "NO_COLOR": "1",
            },
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)

    def __enter__(self) -> Shell:
        """Return the shell itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the shell, and every process that works in its folder."""
        self._reaper.communicate()
        self._bash.wait()
        os.close(self._screen)

    def say(self, words: str) -> None:
        """Put a paragraph between commands."""
        self.text += f"\n{words.strip()}\n\n"

    def run(self, command: str, *expected: str, rc: int | None = 0) -> str:
        """Type a command, and return what it printed, which ``expected`` patterns all match.

        Raises `UnexpectedOutputError`.
        """
        printed, status = self._run(command)
        self._check(command, printed, expected)
        if rc is not None and status != rc:
            raise UnexpectedOutputError(f"{command!r} ended with {status}, not {rc}:\n{printed}")
        self._tell(command, printed)
        return printed

    def see(self, command: str, *expected: str) -> str:
        """Type a command until it prints what is expected, and show only the last time."""
        last = time.monotonic() + self._longest_s
        while True:
            printed, _ = self._run(command)
            if all(re.search(self._with_ports(one), printed, re.MULTILINE) for one in expected):
                break
            if time.monotonic() > last:
                self._check(command, printed, expected)
            select.select([], [], [], _AGAIN_S)
        self._tell(command, printed)
        return printed

    def _run(self, command: str) -> tuple[str, int]:
        stdin = self._bash.stdin
        if stdin is None:
            raise UnexpectedOutputError("the shell has no input")
        stdin.write(f"{self._with_ports(command)}\nprintf '\\n{_END} %d\\n' $?\n".encode())
        stdin.flush()
        read, last = b"", time.monotonic() + self._longest_s
        ending = re.compile(rf"\r\n{_END} (\d+)\r\n$".encode())
        while not (found := ending.search(read)):
            ready, _, _ = select.select([self._screen], [], [], max(0.0, last - time.monotonic()))
            more = os.read(self._screen, 1 << 16) if ready else b""
            if not more:
                raise UnexpectedOutputError(f"{command!r} does not end: {read.decode()}")
            read += more
        return read[: found.start()].decode().replace("\r\n", "\n").strip("\n"), int(found[1])

    def _with_ports(self, text: str) -> str:
        """Return what the page shows, with the ports of this day."""
        for shown, number in self._ports.items():
            text = re.sub(rf"\b{shown}\b", str(number), text)
        return text

    def _check(self, command: str, printed: str, expected: tuple[str, ...]) -> None:
        for one in expected:
            if not re.search(self._with_ports(one), printed, re.MULTILINE):
                raise UnexpectedOutputError(f"{command!r} printed no {one!r}:\n{printed}")

    def _tell(self, command: str, printed: str) -> None:
        for shown, number in self._ports.items():
            printed = re.sub(rf"\b{number}\b", str(shown), printed)
        lines = [f"$ {command}", *(line.rstrip() for line in printed.splitlines())]
        block = "\n".join(lines)
        before = self.text.removesuffix("```\n")
        self.text = (
            f"{before}\n{block}\n```\n"
            if before != self.text
            else f"{self.text}```text\n{block}\n```\n"
        )


@dataclass(frozen=True)
class Page:
    """Its beginning, what is typed, and the ports that it shows."""

    title: str
    acts: Sequence[Callable[[Shell], None]]
    shown_ports: Sequence[int]
    programs: Callable[[], Mapping[str, str]] = dict
    """Shell commands that `restow` and `python` stand beside, by the names that the page has."""

    def lived(self, folder: Path, quick: bool = False) -> str:
        """Type all commands in ``folder``; return the page. Raises `UnexpectedOutputError`.

        With ``quick``, commands of an operator are forked from a process that has imported all.
        """
        ports = dict(zip(self.shown_ports, free_ports(self.shown_ports), strict=True))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RESTOW_")}
        environment = {**kept, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        with ExitStack() as stack:
            shell = stack.enter_context(Shell(folder, environment, ports, self.programs()))
            if quick:
                stack.enter_context(restow_program(folder / "bin" / "restow"))
            try:
                for act in self.acts:
                    act(shell)
            except UnexpectedOutputError:
                sys.stderr.write(shell.text)
                for log in sorted(folder.glob("*.log")):
                    sys.stderr.write(f"\n{log.name}\n{log.read_text()[-4000:]}")
                raise
            return self.title + shell.text

    def print(self) -> None:
        """Print the page, lived in a folder that is deleted."""
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(self.lived(Path(folder)))


def free_ports(shown: Sequence[int]) -> list[int]:
    """Return ports that nobody listens on, as many as those shown.

    They have as many digits as those shown, so that tables stay straight.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in sample(range(6000, 10_000), 4000):
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                if port not in shown:
                    one.bind(("127.0.0.1", port))
                    found.append(port)
            if len(found) == len(shown):
                return found
    raise OSError(f"fewer than {len(shown)} ports of four digits are free")
