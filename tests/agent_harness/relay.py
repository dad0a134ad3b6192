"""A wire between engines and a broker that can be cut, or swallow what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class Relay:
    """Carries bytes to a target; knows how many connections there were, the longest idle one."""

    def __init__(self, target: str) -> None:
        """Relay to ``target``, a host and port."""
        self.address = ""
        self.connections = 0
        self.longest_idle_s = 0.0
        self._target = target
        self._lines: list[_Line] = []
        self._is_cut = False

    def reset(self) -> None:
        """Cut every connection off without a word."""
        for line in self._lines:
            line.abort()
        self._lines.clear()

    def swallow(self) -> None:
        """Drop what is sent on connections that are open now; new connections still work."""
        for line in self._lines:
            line.swallows = True

    def cut(self) -> None:
        """Drop everything that is sent, on new connections too."""
        self._is_cut = True
        self.swallow()

    def heal(self) -> None:
        """Carry new connections again, and end the open ones, whose bytes were lost."""
        self._is_cut = False
        self.reset()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        host, port = self._target.rsplit(":", 1)
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:  # nobody listens there now
            writer.transport.abort()
            return
        line = _Line(self, (writer, there_writer))
        line.swallows = self._is_cut
        self.connections += 1
        self._lines.append(line)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(line.copy(reader, there_writer), line.copy(there_reader, writer))


class _Line:
    def __init__(self, relay: Relay, writers: tuple[asyncio.StreamWriter, ...]) -> None:
        self.swallows = False
        self._relay, self._writers = relay, writers
        self._heard_s = time.monotonic()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            now_s = time.monotonic()
            idle_s, self._heard_s = now_s - self._heard_s, now_s
            self._relay.longest_idle_s = max(self._relay.longest_idle_s, idle_s)
            if not self.swallows:
                writer.write(data)
                await writer.drain()
        if not self.swallows:
            writer.close()


@contextlib.asynccontextmanager
async def relayed(target: str) -> AsyncIterator[Relay]:
    """Run a relay to ``target`` on a port of its own."""
    relay = Relay(target)
    async with await asyncio.start_server(relay.carry, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        relay.address = f"{host}:{port}"
        try:
            yield relay
        finally:
            relay.reset()
