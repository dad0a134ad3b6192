"""Commands as processes of their own, as operators run them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import TextIO

from forked.commands import begin

COMMAND = (sys.executable, "-m", "restow.broker.cli.main")
LINE = "restow broker listening on "


@contextlib.contextmanager
def serving(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[TextIO]:
    """Run a command until SIGTERM, after which it ends well; yields what it prints."""
    reader, writer = os.pipe()
    with open(reader) as stdout:
        process = begin(arguments, (0, writer, 2), env, os.getcwd())
        os.close(writer)
        try:
            yield stdout
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join(30)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()


@contextlib.contextmanager
def broker_process(*options: str) -> Iterator[str]:
    """Run ``restow serve`` on a free port of this machine; yields its address."""
    with serving("serve", "--listen", "127.0.0.1:0", *options) as stdout:
        line = stdout.readline()
        assert line.startswith(LINE), line
        yield line.removeprefix(LINE).strip()


def path_of_python() -> dict[str, str]:
    """Return the PYTHONPATH under which these tests run, if it is set.

    It names the tested code where that is not the installed code.
    """
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def run_restow(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, and return what it prints into files. It has no terminal to ask on."""
    known = {"COLUMNS": "80", "PATH": "/usr/bin:/bin", **path_of_python(), **(env or {})}
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        files = [file.fileno() for file in (stdin, out, err)]
        process = begin(arguments, files, known, os.getcwd())
        process.join(60)
        assert process.exitcode is not None, arguments
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read(), err.read())
