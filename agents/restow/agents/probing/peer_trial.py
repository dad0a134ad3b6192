"""A peer's NIXL metadata is loaded in another process first: what is malformed ends only that one.

NIXL and UCX take metadata at its word: one wrong number in it, and the process that loads it dies,
or one that is a little different does. So its form is checked before. The other process is started
once and stays; one that died is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from restow.agents.errors import AgentClosedError, MetadataRefusedError
from restow.agents.probing.metadata_form import malformed
from restow.agents.reading.nixl_transport import NIXL_MODULE

_PROGRAM = "restow.agents.probing.metadata_trial"


class PeerTrial:
    """Tries metadata on a thread and in a process of its own; holds no event loop up."""

    def __init__(self, own_metadata: bytes) -> None:
        """Nothing is started: `begin` does that, or the first peer.

        ``own_metadata`` shows whether NIXL writes the form that is known here.
        """
        # Another release may write another one: then only loading tells.
        self._knows_form = not malformed(own_metadata)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-trial")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        self._thread.submit(self._running)

    async def load(self, peer: str, metadata: bytes) -> None:
        """Return when the metadata could be loaded, and is the peer's.

        Raises `MetadataRefusedError` and `AgentClosedError`.
        """
        if self._closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._load, peer, metadata)

    def close(self) -> None:
        """End the process. May be repeated."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()
        self._end()

    # -- on the thread ----------------------------------------------------------------------------

    def _load(self, peer: str, metadata: bytes) -> None:
        refusal = malformed(metadata) if self._knows_form else ""
        # What was loaded before may have harmed the process: a new one has the last word.
        refusal = refusal or (self._refusal(peer, metadata) and self._refusal(peer, metadata))
        if self._closed:
            raise _closed()
        if refusal:
            self.begin()  # if it died
            raise MetadataRefusedError(
                f"the NIXL metadata of agent {peer} {refusal}. Nothing is read from that agent: "
                f"restart its engine",
                agent=peer,
            )

    def _refusal(self, peer: str, metadata: bytes) -> str:
        """Why it must not be loaded; then the process has ended. Empty: it may be."""
        try:
            name, refusal = self._ask(metadata)
        except OSError as error:
            return f"can't be tried in a process of its own: {error.strerror}"
        if not refusal and name != peer:
            refusal = f"is of agent {name}"
        if refusal:
            self._end()
        return refusal

    def _ask(self, metadata: bytes) -> tuple[str, str]:
        """What the process says of it. Raises `OSError` if none can be had."""
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return _DIED
        try:
            process.stdin.write(json.dumps({"size_bytes": len(metadata)}).encode() + b"\n")
            process.stdin.write(metadata)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            return _DIED
        name, refusal = json.loads(line)
        return name, refusal

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process; None when there is to be none any more. Raises `OSError`."""
        if self._process is None and not self._closed:
            self._process = subprocess.Popen(  # noqa: S603 - an own module
                [sys.executable, "-m", _PROGRAM, NIXL_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "UCX_HANDLE_ERRORS": "none"},
                process_group=0,  # a terminal's interrupt is for the engine
            )
        if self._closed:
            self._end()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_DIED = ("", "ends the process that loads it")


def _closed() -> AgentClosedError:
    return AgentClosedError("the agent was closed before a read")
