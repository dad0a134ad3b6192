"""Staging: memory beside the regions, for gathering and scattering."""

from __future__ import annotations

import asyncio
import mmap
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from restow.agents.memory.cuda import finished
from restow.agents.memory.errors import StagingExhaustedError
from restow.agents.memory.regions import MemoryKind, MemoryPlace, address_of


class Staging:
    """Memory at one place, for the life of this object; on a host unused pages cost nothing.

    Host staging uses 4 KiB pages, like most engines' memory, because read costs are measured in
    it. In huge pages small pieces would seem cheaper than they are.
    """

    def __init__(self, place: MemoryPlace, size_bytes: int) -> None:
        """Allocate at least one page. Raises `CopyFailedError` if a device has no room."""
        self.size_bytes = size_bytes
        length_bytes = max(size_bytes, mmap.PAGESIZE)
        if place.kind is MemoryKind.HOST:
            mapping = mmap.mmap(-1, length_bytes)
            self._held: object = mapping
            self.address = address_of(mapping)
        else:
            with finished(place.device):
                tensor = torch.empty(length_bytes, dtype=torch.uint8, device=place.device)
            self._held = tensor
            self.address = tensor.data_ptr()


ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class StagingRun:
    """Bytes ``[offset_bytes, offset_bytes + length_bytes)`` of the pool."""

    offset_bytes: int
    length_bytes: int

    @property
    def stop_bytes(self) -> int:
        """One past the last byte."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The use of a pool, and the number of tasks that wait for room."""

    size_bytes: int = 0
    used_bytes: int = 0
    waiting: int = 0

    @classmethod
    def together(cls, figures: Iterable[PoolFigures]) -> PoolFigures:
        """Add up the figures of several pools."""
        several = tuple(figures)
        return cls(
            sum(pool.size_bytes for pool in several),
            sum(pool.used_bytes for pool in several),
            sum(pool.waiting for pool in several),
        )


class StagingAllocator:
    """First-fit allocator over sorted free runs, which joins neighbours. No I/O, no waiting.

    Law: the free runs and the runs in use tile ``[0, size_bytes)``; no two free runs touch.
    """

    def __init__(self, size_bytes: int) -> None:
        """Start with everything free. Sizes are rounded down to a multiple of 64."""
        self.size_bytes = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = [StagingRun(0, self.size_bytes)] if self.size_bytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes that are in no run."""
        return sum(run.length_bytes for run in self._free)

    def allocate(self, length_bytes: int) -> StagingRun | None:
        """Return a run of at least that length, or None if no free run is long enough."""
        length = max(1, -(-length_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for index, free in enumerate(self._free):
            if free.length_bytes >= length:
                rest = StagingRun(free.offset_bytes + length, free.length_bytes - length)
                self._free[index : index + 1] = [rest] if rest.length_bytes else []
                return StagingRun(free.offset_bytes, length)
        return None

    def free(self, run: StagingRun) -> None:
        """Take a run back."""
        insort(self._free, run)
        index = bisect_left(self._free, run)
        for left in (index, index - 1):
            if 0 <= left < len(self._free) - 1:
                first, second = self._free[left : left + 2]
                if first.stop_bytes == second.offset_bytes:
                    joined = StagingRun(
                        first.offset_bytes, first.length_bytes + second.length_bytes
                    )
                    self._free[left : left + 2] = [joined]


class StagingPool:
    """An allocator with a queue: first come, first served, so that no task starves.

    Belongs to one event loop.
    """

    def __init__(self, size_bytes: int) -> None:
        """Start with everything free and nobody waiting."""
        self._allocator = StagingAllocator(size_bytes)
        self._line: deque[tuple[int, asyncio.Future[StagingRun]]] = deque()

    @property
    def free_bytes(self) -> int:
        """Bytes that are in no run."""
        return self._allocator.free_bytes

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return len(self._line)

    @property
    def figures(self) -> PoolFigures:
        """Use of the pool."""
        size_bytes = self._allocator.size_bytes
        return PoolFigures(size_bytes, size_bytes - self.free_bytes, self.waiting)

    async def acquire(self, length_bytes: int) -> StagingRun:
        """Return a run of at least that length, once it is free and earlier tasks are served.

        Raises `StagingExhaustedError` at once if the length exceeds the whole pool.
        """
        if length_bytes > self._allocator.size_bytes:
            raise StagingExhaustedError(
                f"{length_bytes} bytes must be staged, but the staging pool has "
                f"{self._allocator.size_bytes}: start the agent with more staging",
                needed_bytes=length_bytes,
                pool_bytes=self._allocator.size_bytes,
            )
        if not self._line and (run := self._allocator.allocate(length_bytes)) is not None:
            return run
        given: asyncio.Future[StagingRun] = asyncio.get_running_loop().create_future()
        place = (length_bytes, given)
        self._line.append(place)
        try:
            return await given
        except asyncio.CancelledError:
            if place in self._line:
                self._line.remove(place)
            elif given.done() and not given.cancelled():
                self._allocator.free(given.result())
            self._serve()
            raise

    def release(self, run: StagingRun) -> None:
        """Release a run; call it once for each run."""
        self._allocator.free(run)
        self._serve()

    def _serve(self) -> None:
        while self._line:
            length_bytes, future = self._line[0]
            if not future.done():
                run = self._allocator.allocate(length_bytes)
                if run is None:
                    return
                future.set_result(run)
            self._line.popleft()
