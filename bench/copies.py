"""What packing takes at least: two processes gather, read and scatter pieces, and nothing else.

No broker, agent, NIXL or order. Memory has been touched and is in no cache, as in a handoff.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from rows import Yield, compared
from touched import touched

from restow.agents.parts import Parts
from restow.agents.pieces import Copies, Grid
from restow.broker.layout import DType

RUN_BYTES = 24 << 20
PIECES = (256, 1024, 4096)
CACHES_BYTES = 512 << 20
"""More than the caches of both processes hold."""
WARM_UPS = 2
CPU = torch.device("cpu")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Side:
    """One process's memory: pages, a run, and the byte that counts the run's complete parts."""

    pages: int
    run: int
    count: int

    @classmethod
    def of(cls, held: list[Any]) -> Side:
        """Memory that lives as long as ``held``."""
        arrays = [touched(size) for size in (2 * RUN_BYTES, RUN_BYTES, mmap.PAGESIZE)]
        held += arrays
        return cls(*(array.ctypes.data for array in arrays))


def main() -> None:
    """The source: gathers a run when it is told to, in parts of so many bytes, and counts them."""
    torch.set_num_threads(1)
    _LIBC.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # the other process may read this one
    held: list[Any] = []
    side, caches = Side.of(held), touched(CACHES_BYTES)
    print(json.dumps([os.getpid(), side.run, side.count]), flush=True)
    for line in sys.stdin:
        piece_bytes, part_bytes = json.loads(line)
        copies = _pieces(piece_bytes, side, gathered=True)
        _count(side.count, 0)
        caches += 1
        print("ready", flush=True)
        sys.stdin.readline()
        parts = Parts(side.run, RUN_BYTES, part_bytes)
        for number, part in enumerate(parts.prepared_gather([copies], CPU), 1):
            part()
            _count(side.count, number)


def _pieces(piece_bytes: int, side: Side, gathered: bool) -> Copies:
    """Pages at random, and the run."""
    number = RUN_BYTES // piece_bytes
    pages = side.pages + piece_bytes * np.random.default_rng().permutation(2 * number)[:number]
    run = side.run + piece_bytes * np.arange(number)
    src, dst = (pages, run) if gathered else (run, pages)
    one, kind = np.ones((1, 1), np.int64), np.full((1, 1), int(DType.UINT8))
    return Copies((Grid(src[None], dst[None], one * piece_bytes, one, one, kind, kind),))


def _count(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


class Reader:
    """The destination, and its source."""

    def __init__(self, to: IO[str], come: IO[str]) -> None:
        """The source's process has begun."""
        self._to, self._come = to, come
        self._pid, self._run, self._counted = json.loads(come.readline())
        self._held: list[Any] = []
        self._side, self._caches = Side.of(self._held), touched(CACHES_BYTES)

    def pack(self, piece_bytes: int, part_bytes: int) -> float:
        """Seconds until all pieces are in place; each part is taken as soon as it is gathered."""
        copies = _pieces(piece_bytes, self._side, gathered=False)
        self._prepare(piece_bytes, part_bytes)
        parts = Parts(self._side.run, RUN_BYTES, part_bytes)
        began_s = time.perf_counter()
        self._say("go")
        prepared = parts.prepared_scatter([copies], CPU)
        for number, part in enumerate(prepared):
            begin, end = parts.span(number, number + 1)
            while True:
                self._read(self._counted, self._side.count, 1)
                if ctypes.c_uint8.from_address(self._side.count).value > number:
                    break
            self._read(self._run + begin, self._side.run + begin, end - begin)
            part()
        return time.perf_counter() - began_s

    def read(self) -> float:
        """Seconds of reading the run alone."""
        self._prepare(PIECES[0], RUN_BYTES)
        began_s = time.perf_counter()
        self._read(self._run, self._side.run, RUN_BYTES)
        took_s = time.perf_counter() - began_s
        self._say("go")
        return took_s

    def _prepare(self, piece_bytes: int, part_bytes: int) -> None:
        self._say(json.dumps([piece_bytes, part_bytes]))
        self._come.readline()
        self._caches += 1

    def _say(self, words: str) -> None:
        self._to.write(f"{words}\n")
        self._to.flush()

    def _read(self, src: int, dst: int, length: int) -> None:
        here, there = _Range(dst, length), _Range(src, length)
        done = _LIBC.process_vm_readv(
            self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0)
        )
        if done != length:
            raise OSError(ctypes.get_errno(), f"{done} of {length} bytes were read")


@contextmanager
def _reader() -> Iterator[Reader]:
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as source:
        if source.stdin is None or source.stdout is None:
            raise RuntimeError("no pipes to the source")
        yield Reader(source.stdin, source.stdout)
        source.stdin.close()


def run(put: Yield, repeats: int) -> None:
    """Pieces of three sizes; part by part, beside one after the other, and the READ alone."""
    torch.set_num_threads(1)
    with _reader() as reader:
        ways: dict[str, Callable[[int], float]] = {
            "part by part": lambda size: reader.pack(size, 4 << 20),
            "one after the other": lambda size: reader.pack(size, RUN_BYTES),
            "the READ alone": lambda _: reader.read(),
        }
        for piece_bytes in PIECES:
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(WARM_UPS + repeats):
                for name, way in ways.items():
                    seconds = way(piece_bytes)
                    if number >= WARM_UPS:
                        taken[name].append(seconds)
            ours, *references = taken.items()
            for name, seconds_of in references:
                yield_to = f"gather, read, scatter, pieces of {piece_bytes} bytes"
                put(compared("copies", yield_to, ours[1], name, seconds_of, size_bytes=RUN_BYTES))


if __name__ == "__main__":
    main()
