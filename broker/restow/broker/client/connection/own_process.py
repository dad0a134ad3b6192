"""gRPC, NIXL and threads live in one process: a child that is forked later has none of them.

Used there they hang or kill the child without a word; so every public object asks first.
"""

from __future__ import annotations

import os

from restow.broker.client.connection.errors import ForkedError


class OwnProcess:
    """The first process that asked; those that it forked after that are refused."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self._pid: int | None = None

    def check(self) -> None:
        """To be called before gRPC, NIXL or their threads are used. Raises `ForkedError`."""
        pid = os.getpid()
        if self._pid is None:
            self._pid = pid
        elif self._pid != pid:
            raise ForkedError(self._pid, pid)


OWN_PROCESS = OwnProcess()
"""Of all objects: what gRPC has in a process belongs to none of them alone."""
