"""Reading another process of this host: every byte asked for, none beside it, and none too late."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from agent_harness.nixl_source import known_bytes
from agent_harness.processes import READY, Child, child
from agent_harness.reader_scene import FakeTransport
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import (
    AgentError,
    OrderInvalidError,
    PeerLostError,
    ReadDeadlineError,
    ReadFailedError,
)
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace, address_of
from restow.agents.reading import same_host
from restow.agents.reading.host_memory import HostMark, HostMemory, HostRanges
from restow.agents.reading.lane import Known, Read
from restow.agents.reading.reader import Reader
from restow.agents.reading.same_host import HostPeer, SameHost

NAME = "P.0-abc"
SIZE_BYTES = 4 << 20
POISON = 0xA5
FAR_S = 1e9


def _serve(pipe: Connection) -> None:
    """Serve known bytes until the pipe ends.

    Messages plant bytes in the heap, wipe the mark or unmap half of the memory.
    """
    pages = mmap.mmap(-1, SIZE_BYTES)
    pages[:] = known_bytes(SIZE_BYTES).tobytes()
    secret = np.full(4096, 0x5E, np.uint8)
    mark = HostMark(NAME, HostRanges.of([(address_of(pages), SIZE_BYTES, HOST)]))
    planted: list[np.ndarray] = []
    pipe.send(READY)
    pipe.send((mark.show().encoded(), address_of(pages), secret.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            what = pipe.recv()
            if isinstance(what, bytes):  # as what a broker sends stands somewhere in the heap
                planted.append(np.frombuffer(what, np.uint8).copy())
                pipe.send(planted[-1].ctypes.data)
                continue
            if what == "wipe":
                mark.wipe()
            elif what == "unmap":
                half = SIZE_BYTES // 2
                unmap = ctypes.CDLL(None).munmap
                assert not unmap(ctypes.c_void_p(address_of(pages) + half), ctypes.c_size_t(half))
            pipe.send("done")


def _nothing() -> None:
    """Do nothing: nobody asks for the end of a read."""


class Scene:
    """Poisoned memory here, and a process whose memory is known."""

    def __init__(self, source: Child) -> None:
        self.source = source
        self.shown, self.base, self.secret = source.receive()
        memory = HostMemory.decoded(self.shown)
        assert memory is not None
        self.memory = memory
        self.data = np.full(SIZE_BYTES, POISON, np.uint8)
        self.own = HostRanges.of([(self.data.ctypes.data, SIZE_BYTES, HOST)])
        self.peer = HostPeer(NAME, memory, self.own)

    def pieces(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> Descriptors:
        return Descriptors(self.base + src, self.data.ctypes.data + dst, length)

    def some(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sources, destinations and lengths of pieces of many lengths.

        There are gaps between the pieces.
        """
        rng = np.random.default_rng(count)
        slot = SIZE_BYTES // count
        length = rng.integers(0, slot, count)
        src, dst = (slot * rng.permutation(count) + rng.integers(0, slot - length) for _ in "sd")
        return src, dst, length

    def expected(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> np.ndarray:
        known, found = known_bytes(SIZE_BYTES), np.full(SIZE_BYTES, POISON, np.uint8)
        for begin, end, size in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
            found[end : end + size] = known[begin : begin + size]
        return found

    def untouched(self) -> bool:
        return bool((self.data == POISON).all())

    async def tell(self, what: str) -> None:
        self.source.tell(what)
        assert self.source.receive() == "done"


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with child(_serve) as source:
        yield Scene(source)


@pytest.mark.parametrize(("call_pieces", "call_bytes"), [(1024, 64 << 20), (7, 100_000), (5, 900)])
async def test_pieces_arrive_and_what_lies_between_them_is_untouched(
    call_pieces: int, call_bytes: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_PIECES", call_pieces)
    monkeypatch.setattr(same_host, "CALL_BYTES", call_bytes)
    for count in (1, 2, 1023, 1024, 1025, 5000):
        scene.data[:] = POISON
        where = scene.some(count)
        scene.peer.read(scene.pieces(*where), _nothing)
        assert (scene.data == scene.expected(*where)).all(), count


@pytest.mark.parametrize("call_pieces", [1024, 7, 1])
async def test_pieces_that_touch_arrive_wherever_they_go(
    call_pieces: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_PIECES", call_pieces)
    rng = np.random.default_rng(call_pieces)
    for count in (2, 50, 3000):
        # Some of the bounds are equal: pieces of no bytes.
        bounds = np.sort(rng.integers(0, SIZE_BYTES, count + 1))
        src, length = bounds[:-1], np.diff(bounds)
        places = rng.permutation(count)
        dst = np.empty(count, np.int64)
        dst[places] = np.cumsum(length[places]) - length[places]
        kept = rng.permutation(count)[: count - count // 4]
        where = src[kept], dst[kept], length[kept]
        scene.data[:] = POISON
        scene.peer.read(scene.pieces(*where), _nothing)
        assert (scene.data == scene.expected(*where)).all(), count


Run = tuple[int, int]
"""An address in the other process, and a length."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Run]]]:
    """Return what the kernel is asked for: in each call the number of pieces here, and the runs."""
    made: list[tuple[int, list[Run]]] = []
    readv = same_host._readv

    def call(pid: int, here: int, parts: int, there: int, count: int, flags: int) -> int:
        entries = (ctypes.c_uint64 * (2 * count)).from_address(there)
        made.append((parts, list(zip(entries[::2], entries[1::2], strict=True))))
        return int(readv(pid, here, parts, there, count, flags))

    monkeypatch.setattr(same_host, "_readv", call)
    return made


async def test_the_kernel_sees_pieces_that_touch_as_one_run_and_all_in_order(
    scene: Scene, calls: list[tuple[int, list[Run]]]
) -> None:
    calls.clear()
    # Pages of two pieces: the pieces of a page touch, pages do not.
    page = 3000 * np.random.default_rng(1).permutation(100)
    src = np.concatenate([page, page + 1000])
    scene.peer.read(scene.pieces(src, src[::-1].copy(), np.full(200, 1000)), _nothing)
    *seen, mark = [run for _, runs in calls for run in runs]
    assert seen == [(scene.base + 3000 * index, 2000) for index in range(100)]
    assert mark == (scene.memory.mark_address, len(scene.memory.mark))


async def test_calls_stay_as_small_as_they_are_meant_to(
    scene: Scene, calls: list[tuple[int, list[Run]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_BYTES", 1 << 20)
    scene.peer.read(scene.pieces(*scene.some(5000)), _nothing)
    whole = np.array([0]), np.array([0]), np.array([SIZE_BYTES])
    scene.peer.read(scene.pieces(*whole), _nothing)
    assert max(pieces for pieces, _ in calls) <= same_host.CALL_PIECES
    assert max(sum(size_bytes for _, size_bytes in runs) for _, runs in calls) <= 1 << 20
    assert (scene.data == scene.expected(*whole)).all()


async def test_what_lies_outside_is_refused_on_both_sides(scene: Scene) -> None:
    for src, dst in ((SIZE_BYTES - 999, 0), (0, SIZE_BYTES - 999), (-1, 0), (0, -1)):
        src_at, dst_at = np.array([0, src]), np.array([SIZE_BYTES // 2, dst])
        with pytest.raises(ReadFailedError, match="outside"):
            scene.peer.read(scene.pieces(src_at, dst_at, np.array([8, 1000])), _nothing)
    assert scene.untouched()


ALL_MEMORY = b"\x22\x01\x01\x2a\x09" + b"\x80" * 8 + b"\x40"
"""Of earlier releases' `HostMemory`: one range, from 1 to 2**62."""


def _secret(scene: Scene) -> Descriptors:
    """Return descriptors of memory of the process that nobody registered."""
    return Descriptors.single(scene.secret, scene.data.ctypes.data, 4096)


async def test_ranges_are_the_word_of_the_process_and_not_of_who_hands_it_on(scene: Scene) -> None:
    forged = HostMemory.decoded(scene.shown + ALL_MEMORY)
    assert forged is not None
    with pytest.raises(ReadFailedError, match="outside"):
        HostPeer(NAME, forged, scene.own).read(_secret(scene), _nothing)
    assert scene.untouched()


async def test_a_mark_that_was_sent_to_a_process_is_none(scene: Scene) -> None:
    mark = scene.memory.mark
    ranges = np.array([1, 1, 1 << 62]).tobytes()
    scene.source.tell(mark + ranges)
    planted = scene.source.receive()
    with pytest.raises(PeerLostError, match="no mark of its own"):
        HostPeer(NAME, replace(scene.memory, mark_address=planted), scene.own)
    same_host = SameHost(scene.own)
    same_host.prepare(NAME, Known(b"", replace(scene.memory, mark_address=planted)))
    assert not same_host.takes(Read(NAME, scene.pieces(*scene.some(9)), HOST, HOST))
    same_host.close()


@pytest.mark.parametrize(
    ("count", "edges"),
    [(-1, []), (1 << 40, []), (2, [5, 9, 8, 12]), (1, [-5, 9])],
    ids=["less than none", "too many", "they overlap", "a negative address"],
)
def test_ranges_that_can_not_be_are_refused(count: int, edges: list[int]) -> None:
    written = np.array([count, *edges]).tobytes()
    memory = HostMark(NAME, HostRanges.of([])).show()
    at = memory.mark_address + len(memory.mark)
    with pytest.raises(OrderInvalidError):
        memory.ranges(lambda address, size: written[address - at :][:size])


async def test_a_mark_that_was_wiped_before_the_last_byte_spoils_the_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_PIECES", 50)
    calls = 0

    def wipe_in_the_middle() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            scene.source.tell("wipe")
            assert scene.source.receive() == "done"

    with pytest.raises(PeerLostError, match="no longer shows its memory"):
        scene.peer.read(scene.pieces(*scene.some(200)), wipe_in_the_middle)
    assert calls > 3
    with pytest.raises(PeerLostError):
        HostPeer(NAME, scene.memory, scene.own)


async def test_a_killed_process_is_lost(scene: Scene) -> None:
    await scene.source.kill()
    with pytest.raises(PeerLostError, match="there is no process"):
        scene.peer.read(scene.pieces(*scene.some(10)), _nothing)
    assert scene.untouched()


@pytest.mark.parametrize("there", [3, 4], ids=["at once", "in the middle of a call"])
async def test_memory_that_is_gone_fails_the_read(
    there: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_PIECES", 3)
    await scene.tell("unmap")
    src = 16 * np.arange(6)
    src[there:] += SIZE_BYTES // 2  # the call that has the mark can be read whole
    pieces = scene.pieces(src, 8 * np.arange(6), np.full(6, 8))
    with pytest.raises(ReadFailedError, match=r"8 of 24 bytes" if there == 4 else "Bad address"):
        scene.peer.read(pieces, _nothing)


async def test_another_process_of_the_same_number_is_not_read(scene: Scene) -> None:
    # A process may have ended, and its number may have been given to another.
    for pid in (os.getpid(), 1, 2**31 - 1):
        stranger = replace(scene.memory, pid=pid)
        with pytest.raises(AgentError):
            HostPeer(NAME, stranger, scene.own)
    held = ctypes.create_string_buffer(bytes(len(scene.memory.mark)))
    blank = replace(scene.memory, pid=os.getpid(), mark_address=ctypes.addressof(held))
    with pytest.raises(PeerLostError):
        HostPeer(NAME, blank, scene.own)


async def test_nobody_can_show_the_memory_of_another_agent(scene: Scene) -> None:
    with pytest.raises(PeerLostError, match="another agent's memory"):
        HostPeer("somebody", scene.memory, scene.own)


async def test_a_read_ends_between_two_calls_when_it_is_late(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "CALL_PIECES", 50)
    src, dst, length = scene.some(200)
    order = np.argsort(src)
    where = src[order], dst[order], length[order]
    left = 2

    def late_after_two() -> None:
        nonlocal left
        if not left:
            raise ReadDeadlineError("late")
        left -= 1

    with pytest.raises(ReadDeadlineError):
        scene.peer.read(scene.pieces(*where), late_after_two)
    assert (scene.data == scene.expected(*(column[:100] for column in where))).all()


# -- in a reader ----------------------------------------------------------------------------------


async def _reader(scene: Scene) -> tuple[Reader, FakeTransport]:
    transport = FakeTransport()
    transport.copies = True
    reader = Reader(lambda: [SameHost(scene.own), transport])
    reader.add_peer(NAME, b"metadata", scene.memory)
    return reader, transport


async def test_a_reader_leaves_single_runs_and_devices_to_nixl(scene: Scene) -> None:
    reader, transport = await _reader(scene)
    where = scene.some(300)
    await reader.read([Read(NAME, scene.pieces(*where), HOST, HOST)], FAR_S)
    assert (scene.data == scene.expected(*where)).all()
    assert not transport.posted
    device = MemoryPlace(MemoryKind.CUDA, 0)
    one = scene.pieces(*scene.some(1))
    for pieces, src, dst in ((one, HOST, HOST), (scene.pieces(*where), device, HOST)):
        await reader.read([Read(NAME, pieces, src, dst)], FAR_S)
        assert transport.pieces[-1] is pieces
    reader.close()


async def test_a_peer_that_can_not_be_reached_is_read_by_nixl(scene: Scene) -> None:
    scene.memory = replace(scene.memory, pid=2**31 - 1)
    reader, transport = await _reader(scene)
    await reader.read([Read(NAME, scene.pieces(*scene.some(9)), HOST, HOST)], FAR_S)
    assert len(transport.posted) == 1
    reader.close()
