"""A subscriber to KV events, as vLLM's own example is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


def numbers(hashes: Iterable[bytes]) -> list[int]:
    """Return hashes as vLLM publishes them: their last 64 bits."""
    return [int.from_bytes(hashed, "big") & (1 << 64) - 1 for hashed in hashes]


class Told(NamedTuple):
    topic: str
    sequence: int
    events: list[dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]


def told_of(topic: bytes, sequence: bytes, payload: bytes) -> Told:
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    return Told(topic.decode(), int.from_bytes(sequence, "big"), events)


class Subscriber:
    """Hears events, and asks for those that it missed."""

    def __init__(self, events: Any, replays: Any) -> None:
        self._events, self._replays = events, replays

    async def hear(self) -> Told:
        async with asyncio.timeout(30):
            return told_of(*await self._events.recv_multipart())

    async def has_news(self) -> bool:
        return bool(await self._events.poll(100))

    async def replay(self, first: int, *topic: bytes) -> list[Told]:
        await self._replays.send_multipart((b"", first.to_bytes(8, "big"), *topic))
        told: list[Told] = []
        async with asyncio.timeout(30):
            while True:
                _, name, sequence, payload = await self._replays.recv_multipart()
                if sequence == END:
                    return told
                told.append(told_of(name, sequence, payload))

    async def send(self, *frames: bytes) -> None:
        await self._replays.send_multipart(frames)


@contextlib.asynccontextmanager
async def subscriber(
    events: str, replays: str, topic: bytes = b"", listens: bool = False
) -> AsyncIterator[Subscriber]:
    with zmq.asyncio.Context() as context:
        hears, asks = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        try:
            hears.subscribe(topic)
            hears.bind(events) if listens else hears.connect(events)
            asks.connect(replays)
            yield Subscriber(hears, asks)
        finally:
            hears.close(0)
            asks.close(0)
