"""Commands in a pseudo terminal of some width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping

from cli.broker_process import COMMAND

STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(more: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a user's environment: no width and no colors are forced on a command."""
    forced = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
    return {name: value for name, value in more.items() if name not in forced}


@contextlib.contextmanager
def started(
    *arguments: str, columns: int, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command on a terminal; yield the process, and a descriptor of the terminal."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=writer,
        stdout=writer,
        stderr=writer,
        env={**environment(), "TERM": "xterm-256color", **(env or {})},
    )
    os.close(writer)
    try:
        yield process, reader
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def on_terminal(*arguments: str, columns: int, env: Mapping[str, str] | None = None) -> str:
    """Return what a command shows on a terminal, without styles. The command must succeed."""
    code, shown = asked_on_terminal(*arguments, columns=columns, env=env)
    assert code == 0, shown
    return shown


def asked_on_terminal(
    *arguments: str, typed: str = "", columns: int = 100, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Type an answer on the terminal of a command; return its exit status and what it shows."""
    with started(*arguments, columns=columns, env=env) as (process, terminal):
        os.write(terminal, typed.encode())
        shown = b""
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # Linux says EIO when nobody has the other side open
                break
            if not part:
                break
            shown += part
        code = process.wait(30)
    return code, STYLES.sub("", shown.decode()).replace("\r\n", "\n")
