"""Read host memory of other processes of this host, on several threads while cores are idle.

On idle cores two threads copy nearly twice as fast as a single thread. If every core is busy
already, because the ranks of an engine read at the same time, more threads only take turns and cost
more. So after a read whose threads gained nothing, one thread does the next reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import OrderInvalidError, PeerLostError, ReadFailedError
from restow.agents.memory.regions import MemoryKind
from restow.agents.reading.host_memory import HostMemory, HostRanges
from restow.agents.reading.lane import PROCESS_VM_READV, Flight, Known, Read

GAIN = 1.1
"""Threads that together ran for less than this times the read's duration gained nothing."""
SHORT_S = 0.002
"""A read that took less than this tells nothing."""
PAUSE_READS = 8
"""Reads by one thread after a read whose threads gained nothing."""
CALL_PIECES = 1024
"""Most pieces that the kernel takes in one call (UIO_MAXIOV)."""
CALL_BYTES = 64 << 20
"""Most bytes of a call, about 10 ms: a read can be stopped between two calls."""
THREAD_BYTES = 2 << 20
"""Bytes for which starting a thread pays."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class HostPeer:
    """A peer whose memory this process can read."""

    def __init__(self, agent_name: str, memory: HostMemory, own: HostRanges) -> None:
        """Look for the peer's mark; ``own`` is the memory that may be read into.

        Raises `PeerLostError` if the memory cannot be read: another host or namespace, no
        permission, or an ended process. Raises `ReadFailedError` and `OrderInvalidError`.
        """
        self._name = agent_name
        self._memory = memory
        self._own = own
        if not memory.is_of(agent_name):
            raise PeerLostError(
                f"agent {agent_name} shows another agent's memory", agent=agent_name
            )
        if not memory.is_mapped:
            raise PeerLostError(f"agent {agent_name} shows no mark of its own", agent=agent_name)
        self._ranges = memory.ranges(self.bytes_at)
        self.check_mark()

    def check_mark(self) -> None:
        """Raise `PeerLostError` or `ReadFailedError` unless the peer shows its memory still."""
        nothing = np.empty(0, np.int64)
        self.read(Descriptors(nothing, nothing, nothing), lambda: None)

    def read(self, descriptors: Descriptors, check: Callable[[], None]) -> None:
        """Read all pieces. Blocks this thread; other threads of the process run meanwhile.

        Raises `ReadFailedError`, `PeerLostError` and what ``check`` raises, which is called before
        every call of the kernel.
        """
        memory = self._memory
        if not self._ranges.hold(descriptors.src_address, descriptors.length_bytes):
            raise self._failed("pieces lie outside of the memory that it shows")
        if not self._own.hold(descriptors.dst_address, descriptors.length_bytes):
            raise self._failed("pieces would land outside of the memory registered here")
        descriptors = descriptors.cut(CALL_BYTES).in_source_order()
        count = len(descriptors.length_bytes)
        seen = np.zeros(len(memory.mark), np.uint8)
        entries = np.empty((2, count + 1, 2), np.uint64)
        entries[0, :count, 0] = descriptors.dst_address
        entries[1, :count, 0] = descriptors.src_address
        entries[:, :count, 1] = descriptors.length_bytes
        # The kernel copies from the first entry to the last, so the mark is read after all bytes.
        entries[0, count] = seen.ctypes.data, len(seen)
        entries[1, count] = memory.mark_address, len(seen)
        ends = np.cumsum(entries[0, :, 1].astype(np.int64))
        begin = done_bytes = 0
        while begin <= count:
            check()
            fit = int(np.searchsorted(ends, done_bytes + CALL_BYTES, "right"))
            end = min(max(fit, begin + 1), begin + CALL_PIECES)
            self._call(entries, begin, end, int(ends[end - 1]) - done_bytes)
            begin, done_bytes = end, int(ends[end - 1])
        if seen.tobytes() != memory.mark:
            raise PeerLostError(
                f"agent {self._name} is gone: process {memory.pid} no longer shows its memory",
                agent=self._name,
            )

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        """Return bytes of the peer's memory, without checking its ranges."""
        data = np.empty(size_bytes, np.uint8)
        entries = np.array([[[data.ctypes.data, size_bytes]], [[address, size_bytes]]], np.uint64)
        self._call(entries, 0, 1, size_bytes)
        return data.tobytes()

    def _call(self, entries: np.ndarray, begin: int, end: int, wanted_bytes: int) -> None:
        here, there = entries[0, begin:end], _joined(entries[1, begin:end])
        got_bytes = _readv(
            self._memory.pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0
        )
        if got_bytes == wanted_bytes:
            return
        if got_bytes >= 0:
            raise self._failed(f"only {got_bytes} of {wanted_bytes} bytes could be read")
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            raise PeerLostError(
                f"agent {self._name} is gone: there is no process {self._memory.pid}",
                agent=self._name,
            )
        raise self._failed(os.strerror(number))

    def _failed(self, why: str) -> ReadFailedError:
        return ReadFailedError(
            f"the memory of agent {self._name}, process {self._memory.pid}, can't be read: {why}",
            agent=self._name,
        )


class SameHost:
    """A `Transport` for many pieces of host memory of processes on this host."""

    kind = PROCESS_VM_READV

    def __init__(self, own: HostRanges, threads: int = 1) -> None:
        """Read into ``own`` memory, with up to ``threads`` threads for a long read."""
        self._own = own
        self._width = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="restow-copy")
        self._pause_reads = 0
        """Reads to come that are not shared."""
        self._peers: dict[str, HostPeer | None] = {}
        """Peers by name; None for a peer that can't be read in this way."""

    def prepare(self, peer: str, known: Known) -> None:
        """Look for the peer's mark, once."""
        if peer in self._peers:
            return
        self._peers[peer] = None
        if known.host_memory is not None:
            with contextlib.suppress(PeerLostError, ReadFailedError, OrderInvalidError):
                self._peers[peer] = HostPeer(peer, known.host_memory, self._own)

    def takes(self, read: Read) -> bool:
        """Return whether this transport does a read faster than NIXL."""
        of_hosts = read.src.kind is read.dst.kind is MemoryKind.HOST
        is_faster = len(read.descriptors.length_bytes) > 1 or self._threads_for(read) > 1
        return of_hosts and is_faster and self._peers.get(read.peer) is not None

    def post(self, read: Read, check: Callable[[], None]) -> Flight:
        """Read everything before returning."""
        peer = self._peers[read.peer]
        if peer is None:
            raise PeerLostError(f"agent {read.peer} shows no memory on this host", agent=read.peer)
        count = self._threads_for(read)
        if count > 1 and not self._pause_reads:
            self._read_in_parts(peer, read.descriptors.split(count), check)
        else:
            self._pause_reads -= count > 1
            peer.read(read.descriptors, check)
        return Flight(read.peer, None, True)

    def _threads_for(self, read: Read) -> int:
        """Return the number of threads that are worth their start."""
        most = 1 if read.alone else self._width
        return max(1, min(most, read.descriptors.size_bytes // THREAD_BYTES))

    def _read_in_parts(
        self, peer: HostPeer, parts: Sequence[Descriptors], check: Callable[[], None]
    ) -> None:
        """Read each part on a thread of its own, and wait for all, even if one fails."""
        began_s = time.perf_counter()
        running = [self._threads.submit(_timed, peer, part, check) for part in parts]
        wait(running)
        ran_s = sum(future.result() for future in running)
        elapsed_s = time.perf_counter() - began_s
        if elapsed_s >= SHORT_S and ran_s < GAIN * elapsed_s:
            self._pause_reads = PAUSE_READS

    def poll(self, flight: Flight) -> bool:
        """Return True: `post` has read everything."""
        return flight.done

    def release(self, flight: Flight) -> None:
        """Do nothing, because nothing is kept."""

    def forget(self, peer: str) -> None:
        """Forget what the peer showed."""
        self._peers.pop(peer, None)

    def progress(self) -> None:
        """Do nothing, because there are no connections."""

    def close(self) -> None:
        """Stop the threads; no read is in flight."""
        self._threads.shutdown()


def _timed(peer: HostPeer, part: Descriptors, check: Callable[[], None]) -> float:
    """Read, and return how long this thread ran."""
    began_s = time.thread_time()
    peer.read(part, check)
    return time.thread_time() - began_s


def _joined(entries: np.ndarray) -> np.ndarray:
    """Join adjacent entries, because the kernel looks up the pages of each entry anew."""
    address, length_bytes = entries.T
    is_apart = address[1:] != address[:-1] + length_bytes[:-1]
    first = np.flatnonzero(np.concatenate([[True], is_apart]))
    return np.stack([address[first], np.add.reduceat(length_bytes, first)], axis=1)
