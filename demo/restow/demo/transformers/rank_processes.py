"""A process for each rank of an engine, which embeds the rank's agent as an engine's worker would.

A fork server imports everything once and forks the ranks' processes: importing torch takes seconds,
forking milliseconds. Before the fork gRPC and NIXL may be imported, but not started.

A process and its engine exchange lines of JSON on a socket. The engine first says whom the process
serves and where the memory is; the process attaches the memory, starts the agent and answers
`READY_WORD`. Then the engine sends fences. The process ends with the socket, and when the broker
is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn, Self, TextIO

from restow.agents.agent import Agent
from restow.agents.memory.shared_memory import SharedMemory, SharedRegion
from restow.broker.errors import RestowError
from restow.broker.logs import log_to_stderr

WAKE = b"f"
READY_WORD = "ready"


class WorkerFailedError(RestowError, status="UNAVAILABLE", reason="WORKER_FAILED"):
    """The process of a rank has ended; its error is on stderr."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The engine and the rank that an agent serves."""

    broker: str
    engine_id: str
    incarnation: str
    rank: int


class ForkServer:
    """Starts the processes of ranks, which end with their sockets."""

    def __init__(self) -> None:
        """Start the server; it imports while the caller goes on. ``with`` ends it."""
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self._control.close()
        self._process.wait()

    def fork_worker(self) -> socket.socket:
        """Fork a rank's process; return the socket on which it speaks lines of JSON."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [WAKE], [theirs.fileno()])
        return ours


class WorkerAgent:
    """The engine's end of a rank's process."""

    def __init__(
        self, forks: ForkServer, identity: RankIdentity, regions: Sequence[SharedRegion]
    ) -> None:
        """Fork the process; `start` waits for it."""
        self._identity = identity
        self._socket = forks.fork_worker()
        self._lines = self._socket.makefile("rw")
        self._send({**asdict(identity), "regions": [asdict(region) for region in regions]})

    def start(self) -> None:
        """Wait until the broker knows the agent. Raises `WorkerFailedError`."""
        line = self._lines.readline().strip()
        if line != READY_WORD:
            raise self._failed(f"did not start: {line or 'see its error above'}")

    @property
    def lost(self) -> bool:
        """Whether the process has ended. Only a new engine starts another process."""
        readable, _, _ = select.select([self._socket], [], [], 0)
        return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)

    def fence(self, handoff_id: str) -> None:
        """Report that the rank's part of a handoff is complete. Raises `WorkerFailedError`."""
        try:
            self._send({"fence": handoff_id})
        except OSError as error:
            raise self._failed(f"has ended ({error}): start the engine again") from None

    def close(self) -> None:
        """End the process, and wait until it has given the memory back."""
        self._socket.shutdown(socket.SHUT_WR)
        self._lines.read()
        self._lines.close()
        self._socket.close()

    def _failed(self, words: str) -> WorkerFailedError:
        engine, rank = self._identity.engine_id, self._identity.rank
        return WorkerFailedError(
            f"the worker of engine {engine}, rank {rank} {words}", engine=engine, rank=rank
        )

    def _send(self, message: object) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()


# -- in the fork server and in the processes of ranks ---------------------------------------------


def main() -> None:
    """Fork a process for each file descriptor that arrives, until the control socket ends."""
    # The kernel reaps the processes.
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
                serve(socket.socket(fileno=descriptors[0]))
            _leave()
        os.close(descriptors[0])


def serve(engine: socket.socket) -> None:
    """Serve a rank until the socket ends. An error at start is answered instead of `READY_WORD`."""
    log_to_stderr(level=logging.WARNING)
    with engine, engine.makefile("rw") as lines:
        order = json.loads(lines.readline())
        regions = [SharedRegion(**region) for region in order["regions"]]
        names = {region.shared_memory for region in regions}
        attached = {name: SharedMemory.attach(name) for name in names}
        agent = Agent(
            broker=order["broker"],
            engine_id=order["engine_id"],
            incarnation=order["incarnation"],
            rank=order["rank"],
            regions=[region.memory(attached[region.shared_memory]) for region in regions],
            on_lost=lambda _: engine.shutdown(socket.SHUT_RDWR),
        )
        try:
            agent.start()
        except RestowError as error:
            _answer(lines, f"{error.reason}: {error.message}")
            return
        with contextlib.closing(agent):
            _answer(lines, READY_WORD)
            for line in lines:
                agent.fence(json.loads(line)["fence"])
        for memory in attached.values():
            memory.close()


def _answer(lines: TextIO, words: str) -> None:
    lines.write(words + "\n")
    lines.flush()


def _leave() -> NoReturn:
    """End now: everything is given back, and tearing torch down takes a good part of a second."""
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
