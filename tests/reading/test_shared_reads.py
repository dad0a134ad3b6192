"""Long reads of other processes on this host, shared out over threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import ReadFailedError
from restow.agents.memory.regions import HOST
from restow.agents.reading import same_host
from restow.agents.reading.host_memory import HostMark, HostRanges
from restow.agents.reading.lane import Known, Read
from restow.agents.reading.same_host import THREAD_BYTES, HostPeer, SameHost

NAME = "P.0-abc"
SIZE_BYTES = 3 * THREAD_BYTES


class Scene:
    """This process reads itself; what each thread reads is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known = np.random.default_rng(7).integers(0, 256, SIZE_BYTES).astype(np.uint8)
        self.data = np.zeros(SIZE_BYTES, np.uint8)
        shown, own = (
            HostRanges.of([(array.ctypes.data, SIZE_BYTES, HOST)])
            for array in (self.known, self.data)
        )
        self.mark = HostMark(NAME, shown)
        self.transport = SameHost(own, threads=2)
        self.transport.prepare(NAME, Known(b"", self.mark.show()))
        self.parts: list[Descriptors] = []
        self.threads: set[int] = set()
        read = HostPeer.read

        def noted(peer: HostPeer, descriptors: Descriptors, check: Callable[[], None]) -> None:
            self.parts.append(descriptors)
            self.threads.add(threading.get_ident())
            read(peer, descriptors, check)

        monkeypatch.setattr(HostPeer, "read", noted)

    def read(self, pieces: int = 8, size_bytes: int = SIZE_BYTES, alone: bool = False) -> Read:
        length = np.full(pieces, size_bytes // pieces, np.int64)
        at = np.arange(pieces) * length
        where = (self.known.ctypes.data + at, self.data.ctypes.data + at, length)
        return Read(NAME, Descriptors(*where), HOST, HOST, alone)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.transport.close()


def _go_on() -> None:
    """Do nothing: nobody asks for the end of a read."""


@pytest.mark.parametrize("pieces", [1, 3, 8, 1000])
def test_a_long_read_is_shared_out_and_all_arrives(pieces: int, scene: Scene) -> None:
    read = scene.read(pieces)
    assert scene.transport.takes(read), "a run as well"
    assert scene.transport.post(read, _go_on).done
    size_bytes = read.descriptors.size_bytes
    assert (scene.data[:size_bytes] == scene.known[:size_bytes]).all()
    assert len(scene.parts) == 2
    assert sum(part.size_bytes for part in scene.parts) == size_bytes
    assert threading.get_ident() not in scene.threads


@pytest.mark.parametrize("how", ["short", "alone"])
def test_a_short_read_and_one_that_is_measured_are_read_by_one_thread(
    how: str, scene: Scene
) -> None:
    short, alone = scene.read(size_bytes=2 * THREAD_BYTES - 8), scene.read(alone=True)
    scene.transport.post({"short": short, "alone": alone}[how], _go_on)
    assert scene.threads == {threading.get_ident()}
    assert not scene.transport.takes(scene.read(1, alone=True)), "a run is left to NIXL"


@pytest.mark.parametrize(
    ("ran_s", "elapsed_s", "shared"),
    [(0.018, 0.010, 4), (0.010, 0.010, 1), (0.0001, 0.001, 4)],
    ids=["gained", "gained nothing", "short"],
)
def test_one_thread_does_the_next_reads_if_several_gained_nothing(
    ran_s: float, elapsed_s: float, shared: int, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, elapsed_s)
    monkeypatch.setattr(same_host, "_timed", lambda *_: ran_s / 2)
    monkeypatch.setattr(same_host, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for _ in range(4):
        scene.transport.post(scene.read(), _go_on)
    assert next(clock) == pytest.approx(2 * shared * elapsed_s)


def test_reads_are_shared_again_after_a_pause(scene: Scene) -> None:
    scene.transport._pause_reads = 1
    scene.transport.post(scene.read(), _go_on)
    assert scene.threads == {threading.get_ident()}
    scene.transport.post(scene.read(), _go_on)
    assert len(scene.parts) == 3


def test_a_share_that_fails_is_raised_when_the_other_has_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), threading.Event()

    def one_fails(peer: HostPeer, descriptors: Descriptors, check: Callable[[], None]) -> None:
        if descriptors.src_address[0] == scene.known.ctypes.data:
            failed.set()
            raise ReadFailedError("broke")
        assert failed.wait(10)
        ended.set()

    monkeypatch.setattr(HostPeer, "read", one_fails)
    with pytest.raises(ReadFailedError):
        scene.transport.post(scene.read(), _go_on)
    assert ended.is_set()
