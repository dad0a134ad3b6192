"""A rank's process attaches its engine's shared memory and embeds the rank's agent.

It speaks lines of JSON on a socket: first it is told whom it serves and where the memory is, and
answers `READY_WORD`, then come fences. Ends with the socket, and where the
memory can be read no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from typing import TextIO

from restow.agents.agent import Agent
from restow.agents.memory.shared_memory import SharedMemory, SharedRegion
from restow.broker.errors import RestowError
from restow.broker.layout.values import ModelIdentity
from restow.broker.logs import log_to_stderr

READY_WORD = "ready"


def serve(told_on: socket.socket) -> None:
    """Serve until the socket ends. An error of the start is answered in place of `READY_WORD`."""
    log_to_stderr(level=logging.WARNING)
    with told_on, told_on.makefile("rw") as lines:
        told = json.loads(lines.readline())
        regions = [SharedRegion(**region) for region in told["regions"]]
        names = {region.shared_memory for region in regions}
        attached = {name: SharedMemory.attach(name) for name in names}
        agent = Agent(
            broker=told["broker"],
            engine_id=told["engine_id"],
            incarnation=told["incarnation"],
            rank=told["rank"],
            regions=[region.memory(attached[region.shared_memory]) for region in regions],
            on_lost=lambda _: told_on.shutdown(socket.SHUT_RDWR),
            model=ModelIdentity(**told["model"]),
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
