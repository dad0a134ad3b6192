"""READ between two processes: every byte that is asked for, and none beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from agent_harness.nixl_source import SIZE_BYTES, known_bytes, serve_known_bytes
from agent_harness.processes import TCP, child
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import PeerLostError, ReadFailedError
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Flight, Known, Read
from restow.agents.reading.nixl_transport import NixlTransport

PIECE_BYTES = 1000  # not a power of two, so that pieces begin anywhere
POISON = 0xA5
WAIT_S = 20.0


class Reading:
    """This side: poisoned memory that is registered, and a source that is known."""

    def __init__(self, hello: tuple[str, bytes, int]) -> None:
        self.peer, self.metadata, self.base = hello
        self.data = np.full(SIZE_BYTES, POISON, np.uint8)
        self.transport = NixlTransport("destination")
        self.transport.register(self.data.ctypes.data, len(self.data), HOST)
        self.transport.prepare(self.peer, Known(self.metadata))

    def post(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> Flight:
        descriptors = Descriptors(self.base + src, self.data.ctypes.data + dst, length)
        return self.transport.post(Read(self.peer, descriptors, HOST, HOST), lambda: None)

    def read(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> None:
        flight = self.post(src, dst, length)
        deadline_s = time.monotonic() + WAIT_S
        while not self.transport.poll(flight):
            assert time.monotonic() < deadline_s, "the read does not end"
        self.transport.release(flight)


@pytest.fixture
def closing() -> Iterator[list[Reading]]:
    readings: list[Reading] = []
    yield readings
    for reading in readings:
        reading.transport.close()


def _pieces() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = SIZE_BYTES // (2 * PIECE_BYTES)
    order = np.random.default_rng(1).permutation(count)
    src = order * 2 * PIECE_BYTES
    dst = np.arange(count) * 2 * PIECE_BYTES + 17
    return src, dst, np.full(count, PIECE_BYTES)


@pytest.mark.parametrize("tls", ["all", TCP])
async def test_pieces_arrive_and_what_lies_between_them_is_untouched(
    tls: str, monkeypatch: pytest.MonkeyPatch, closing: list[Reading]
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    async with child(serve_known_bytes, tls=tls) as source:
        reading = Reading(source.receive())
        closing.append(reading)
        src, dst, length = _pieces()
        reading.read(src, dst, length)
        expected = np.full(SIZE_BYTES, POISON, np.uint8)
        known = known_bytes()
        for begin, end in zip(src.tolist(), dst.tolist(), strict=True):
            expected[end : end + PIECE_BYTES] = known[begin : begin + PIECE_BYTES]
        assert (reading.data == expected).all()


async def test_memory_that_is_not_registered_is_refused_on_both_sides(
    closing: list[Reading],
) -> None:
    async with child(serve_known_bytes) as source:
        reading = Reading(source.receive())
        closing.append(reading)
        one = np.array([1000])
        for src, dst in ((SIZE_BYTES - 999, 0), (0, SIZE_BYTES - 999)):
            with pytest.raises(ReadFailedError):
                reading.post(np.array([src]), np.array([dst]), one)
        assert (reading.data == POISON).all()


async def test_metadata_of_another_agent_is_refused(closing: list[Reading]) -> None:
    async with child(serve_known_bytes) as source:
        reading = Reading(source.receive())
        closing.append(reading)
        with pytest.raises(PeerLostError, match="is of agent source-"):
            reading.transport.prepare("somebody", Known(reading.metadata))
        with pytest.raises(PeerLostError, match="can't be connected"):
            reading.transport.prepare("nobody", Known(b"no metadata at all"))


async def test_a_peer_is_added_once_and_may_return(closing: list[Reading]) -> None:
    async with child(serve_known_bytes) as source:
        reading = Reading(source.receive())
        closing.append(reading)
        for _ in range(2):
            reading.transport.prepare(reading.peer, Known(reading.metadata))
            reading.read(np.array([0]), np.array([0]), np.array([64]))
            reading.transport.forget(reading.peer)
        reading.transport.prepare(reading.peer, Known(reading.metadata))
        reading.read(np.array([64]), np.array([64]), np.array([64]))
        assert (reading.data[:128] == known_bytes()[:128]).all()
