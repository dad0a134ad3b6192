"""A program that loads peers' NIXL metadata, and may crash in place of the agent.

Its argument is the name of NIXL's module (which, unlike NIXL itself, loads no torch). For each peer
stdin has the metadata's size as a line of JSON, then its bytes. The answer is a line of JSON on
stdout: the agent's name in the metadata, and the error if it can't be loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import sys
from typing import Any

START_S = 60
"""Time for NIXL to start on a busy machine."""
LOAD_S = 10


class Trial:
    """A NIXL agent that only loads metadata."""

    def __init__(self, nixl: Any) -> None:
        """Start NIXL."""
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl.nixl_agent(f"trial-{secrets.token_hex(6)}", config)
        self._refusals: tuple[type[Exception], ...] = (UnicodeError, RuntimeError, MemoryError)
        for value in vars(nixl.nixlBind).values():
            if isinstance(value, type) and issubclass(value, Exception):
                self._refusals += (value,)

    def load(self, metadata: bytes) -> tuple[str, str]:
        """Return the name of the metadata's agent, and the error if it can't be loaded."""
        try:
            loaded = self._agent.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else loaded
            self._agent.remove_remote_agent(name)
        except self._refusals as error:
            return "", str(error) or type(error).__name__
        return name, ""


def main() -> None:
    """Load what stdin has until it ends, or a signal ends this process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(START_S)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # UCX's prints must not mix with the answers
    trial = Trial(importlib.import_module(sys.argv[1]))
    signal.alarm(0)
    while line := sys.stdin.buffer.readline():
        metadata = sys.stdin.buffer.read(json.loads(line)["size_bytes"])
        signal.alarm(LOAD_S)
        answer = trial.load(metadata)
        signal.alarm(0)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
