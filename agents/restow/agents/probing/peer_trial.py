"""Check a peer's NIXL metadata, and try to load it in another process, before it is trusted.

The check walks the metadata as NIXL 1.5 and UCX 1.23 write it, to the last field. Both libraries
trust some fields: an index that is too large leads them beyond their tables, and whether the
process crashes is chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from restow.agents.memory.errors import (
    AgentClosedError,
    MetadataRefusedError,
    PeerLostError,
    TransportFailedError,
)
from restow.agents.reading.nixl_transport import NIXL_MODULE

MAGIC = b"nixlSerDes|"
KINDS = {0, 1}
"""Memory kinds that agents register, as NIXL numbers them: host and device memory."""
MEMORY_TYPES = 9
"""Number of memory types that UCX writes into remote keys."""
PLACE_BYTES = 24
"""Bytes before a remote key: address, length, device."""


class FormError(ValueError):
    """A flaw of the metadata, in words."""


@dataclass(slots=True)
class _Fields:
    """A sequence of fields: each is a tag, eight bytes of length, the value, and a bar."""

    data: bytes
    at: int = 0

    def value(self, tag: bytes) -> bytes:
        begin = self.at + len(tag) + 8
        end = begin + int.from_bytes(self.data[begin - 8 : begin], "little")
        if not self.data.startswith(tag, self.at) or self.data[end : end + 1] != b"|":
            raise FormError(f"no field {tag.decode()!r} at byte {self.at}")
        self.at = end + 1
        return self.data[begin:end]

    def number(self, tag: bytes, size_bytes: int = 8) -> int:
        value = self.value(tag)
        if len(value) != size_bytes:
            raise FormError(f"a number {tag.decode()!r} of {len(value)} bytes")
        return int.from_bytes(value, "little")

    def word(self, tag: bytes, expected: bytes) -> None:
        if (value := self.value(tag)) != expected:
            raise FormError(f"{value!r} in place of {expected!r}")


def malformed(metadata: bytes) -> str:
    """Return the metadata's flaw as a clause ("is malformed: ..."), or an empty string."""
    try:
        _check(metadata)
    except FormError as error:
        return f"is malformed: {error}"
    return ""


def _check(metadata: bytes) -> None:
    if not metadata.startswith(MAGIC):
        raise FormError("it does not begin as NIXL metadata")
    fields = _Fields(metadata, len(MAGIC))
    fields.value(b"Agent")
    # A count that is too large runs out of fields, which is reported there.
    for _ in range(fields.number(b"Conns")):
        fields.value(b"t")
        fields.value(b"c")
    fields.word(b"", b"MemSection")
    for _ in range(fields.number(b"nixlSecElms")):
        fields.value(b"bknd")
        fields.word(b"nixlDList", b"nixlSDList")
        if (kind := fields.number(b"t", 4)) not in KINDS:
            raise FormError(f"memory of kind {kind}")
        for _ in range(fields.number(b"n")):
            _check_key(fields.value(b"")[PLACE_BYTES:])
    if fields.at != len(metadata):
        raise FormError("it continues after its last field")


def _check_key(key: bytes) -> None:
    """Check a map of memory domains, a memory type, a key for each domain, and distances."""
    domains = int.from_bytes(key[:8], "little").bit_count()
    if len(key) < 9 + domains or key[8] >= MEMORY_TYPES:
        raise FormError("a remote key has an unknown memory type")
    at = 9
    for _ in range(domains):
        at += 1 + key[at] if at < len(key) else len(key)
    if at > len(key):
        raise FormError("a remote key ends too early")


EXIT_S = 0.02
"""Time in which the threads of a killed process end, before it is waited for.

Linux 6.18 was seen to spin for more than ten seconds in `wait4`, where it removes the process from
/proc (`shrink_dcache_parent`); the agent's process can't even be killed then.
"""

_PROGRAM = "restow.agents.probing.nixl_metadata_trial"


class PeerTrial:
    """Tries metadata on a thread and in another process, without blocking the event loop."""

    def __init__(self, own_metadata: bytes, is_on: bool = True) -> None:
        """Prepare; `begin` or the first peer starts the process, unless ``is_on`` is False.

        ``own_metadata`` shows whether the installed NIXL writes the form that is known here.
        """
        self._is_on = is_on
        # Another release may write another form; then only loading can tell.
        self._knows_form = not malformed(own_metadata)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-trial")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        if self._is_on:
            self._thread.submit(self._running)

    async def load(self, peer: str, metadata: bytes) -> None:
        """Return once the metadata could be loaded, and names the peer.

        Raises `MetadataRefusedError`, `PeerLostError`, `TransportFailedError` and
        `AgentClosedError`.
        """
        if self._closed:
            raise AgentClosedError("the agent is closed")
        if self._is_on:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._load, peer, metadata)

    async def close(self) -> None:
        """End the process. May be called again."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        if self._is_on:
            await asyncio.to_thread(self._thread.shutdown)
            await asyncio.to_thread(self._end)

    # -- on the thread ----------------------------------------------------------------------------

    def _load(self, peer: str, metadata: bytes) -> None:
        if self._knows_form and (fault := malformed(metadata)):
            raise _refused(peer, fault)
        try:
            # Metadata that was loaded before may have harmed the process, so a new process decides.
            answer = self._ask(metadata) or self._ask(metadata)
            if self._closed:
                raise AgentClosedError("the agent was closed before a read")
            name, failure = answer or ("", "")
            if name != peer:  # a failure may spoil what is loaded next
                self._end()
                self._running()
        except OSError as error:
            raise TransportFailedError(
                f"no process for trying metadata can be started: {error.strerror}"
            ) from None
        if answer is None:
            raise _refused(peer, "kills the process that loads it")
        if failure:
            raise PeerLostError(f"agent {peer} can't be connected: {failure}", agent=peer)
        if name != peer:
            raise _refused(peer, f"names agent {name}")

    def _ask(self, metadata: bytes) -> tuple[str, str] | None:
        """Return the agent's name and the loading error that the process reports; None if it died.

        Raises `OSError` if no process can be started.
        """
        process = self._running()
        if process is None or process.stdin is None or process.stdout is None:
            return None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"size_bytes": len(metadata)}).encode() + b"\n")
            process.stdin.write(metadata)
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self._end()
            return None
        name, failure = json.loads(line)
        return name, failure

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the process, or None after `close`. Raises `OSError`."""
        if self._process is None and not self._closed:
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                [sys.executable, "-m", _PROGRAM, NIXL_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "UCX_HANDLE_ERRORS": "none"},
                process_group=0,  # so that a terminal's interrupt reaches only the engine
            )
        if self._closed:
            self._end()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            time.sleep(EXIT_S)
            process.communicate()


def _refused(peer: str, why: str) -> MetadataRefusedError:
    return MetadataRefusedError(
        f"the NIXL metadata of agent {peer} {why}; nothing is read from it: restart its engine",
        agent=peer,
    )
