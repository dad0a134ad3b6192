"""Commands of Restow, in processes that need not import anything first: see `forked.server`.

They are what a shell starts otherwise: they have files, a folder and an environment of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from forked.server import start

_PROGRAM = """#!{python} -IS
import json, os, socket, sys
if {{*sys.argv[1:2]}} & {{"agent", "router", "serve", "store"}}:  # signals are to reach it
    os.execv({python!r}, [{python!r}, "-m", "restow.broker.cli.main", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    words = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(words).to_bytes(8)], [0, 1, 2])
    server.sendall(words)
    sys.exit(int(server.recv(8)))
"""


def begin(
    arguments: Sequence[str],
    files: Sequence[int],
    environment: Mapping[str, str] | None = None,
    folder: str | Path = ".",
) -> BaseProcess:
    """Begin `restow`; ``files`` are its stdin, stdout and stderr."""
    shared = [Connection(os.dup(file)) for file in files]
    return start(_restow, list(arguments), str(folder), shared, environment=environment)


def begin_python(
    text: str, files: Sequence[int], environment: Mapping[str, str], folder: str | Path
) -> BaseProcess:
    """Begin a program of Python; ``files`` are its stdin, stdout and stderr."""
    shared = [Connection(os.dup(file)) for file in files]
    return start(_python, text, str(folder), shared, environment=environment)


@contextlib.contextmanager
def restow_program(file: Path) -> Iterator[None]:
    """Write a program `restow` for shells, which works inside of the ``with``.

    What runs until it is told to stop is a process that imports everything, as elsewhere.
    """
    path = f"\0restow-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        file.write_text(_PROGRAM.format(python=sys.executable, path=path))
        file.chmod(0o755)
        serving = start(_serve, server)
    try:
        yield
    finally:
        serving.kill()
        serving.join()


def _restow(arguments: list[str], folder: str, files: Sequence[Connection]) -> None:
    from restow.broker.cli.main import main

    _take(folder, [file.fileno() for file in files])
    main(arguments)


def _python(text: str, folder: str, files: Sequence[Connection]) -> None:
    _take(folder, [file.fileno() for file in files])
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})  # noqa: S102 - of our pages


def _take(folder: str, files: Sequence[int]) -> None:
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process


def _serve(server: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _answer(client)
            finally:
                os._exit(0)
        client.close()


def _answer(client: socket.socket) -> None:
    from restow.broker.cli.main import main

    head, files, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as more:
        arguments, folder, environment = json.loads(more.read(int.from_bytes(head)))
    os.environ.clear()
    os.environ.update(environment)
    _take(folder, files)
    code: object = 1
    try:
        main(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        if sys.exc_info()[0] is not None:  # as the interpreter does at its end
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        client.sendall(str(code).encode())
