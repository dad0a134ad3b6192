"""Load peers' NIXL metadata, in a process of its own that may die of it.

Run as a program, with the name of NIXL's module (which, unlike NIXL itself, loads no torch). The
size of a peer's metadata comes as a line of JSON on stdin, then its bytes. The answer is a line of
JSON on stdout: whose metadata NIXL says it is, and why it can't be loaded.
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
"""For NIXL to be loaded and set up, where the machine is busy."""
LOAD_S = 10


class Trial:
    """A NIXL agent that reads nobody."""

    def __init__(self, nixl: Any) -> None:
        """Set it up."""
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl.nixl_agent(f"trial-{secrets.token_hex(6)}", config)
        self._refusals: tuple[type[Exception], ...] = (UnicodeError, RuntimeError, MemoryError)
        for one in vars(nixl.nixlBind).values():
            if isinstance(one, type) and issubclass(one, Exception):
                self._refusals += (one,)

    def load(self, metadata: bytes) -> tuple[str, str]:
        """Whose it is, and why it can't be loaded."""
        try:
            loaded = self._agent.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else loaded
            self._agent.remove_remote_agent(name)
        except self._refusals as error:
            return "", str(error) or type(error).__name__
        return name, ""


def main() -> None:
    """Load and drop what comes, until stdin ends, or this process by a signal."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(START_S)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what UCX prints is no answer
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
