"""`ForkServer` is a process that has imported everything, and forks a worker for each rank.

Importing torch takes seconds, forking milliseconds, so a host of ranks starts as fast as one.
Nothing of gRPC or NIXL may be started before the fork, only imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import NoReturn, Self

WAKE = b"f"


class ForkServer:
    """Starts workers (`rank_worker`), which end with their sockets."""

    def __init__(self) -> None:
        """Start the process; it imports while the caller goes on. ``with`` ends it."""
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-m",
                    "restow.agents.engines.common.fork_server",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
            )

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._control.close()
        self._process.wait()

    def fork_worker(self) -> socket.socket:
        """Fork a worker; returns the socket on which it speaks lines of JSON."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [WAKE], [theirs.fileno()])
        return ours


def main() -> None:
    """Fork a worker for each file descriptor that arrives, until the control socket ends."""
    # Imported before the forks, and only here.
    from restow.agents.engines.common import rank_worker

    # The kernel reaps the workers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            _leave()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            with contextlib.suppress(KeyboardInterrupt):
                rank_worker.serve(socket.socket(fileno=descriptors[0]))
            _leave()
        os.close(descriptors[0])


def _leave() -> NoReturn:
    """End now: all is given back, and tearing torch down would take a good part of a second."""
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
