"""Long reads of other processes on this host, shared out over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import ReadFailedError
from restow.agents.memory.regions import HOST
from restow.agents.reading.host_memory import HostMark, HostRanges
from restow.agents.reading.same_host import THREAD_BYTES, HostPeer, SameHost
from restow.agents.reading.transport import Known, Read

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

    def taught(self) -> list[tuple[float, float]]:
        """What shared reads teach from now on."""
        seen: list[tuple[float, float]] = []
        self.transport._spreading.saw = lambda *read: seen.append(read)  # type: ignore[method-assign]
        return seen

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
    """Nobody asks for the end of a read."""


@pytest.mark.parametrize("pieces", [1, 3, 8, 1000])
def test_a_long_read_is_shared_out_and_all_arrives(pieces: int, scene: Scene) -> None:
    read = scene.read(pieces)
    assert scene.transport.takes(read), "a run as well"
    seen = scene.taught()
    assert scene.transport.post(read, _go_on).done
    size_bytes = read.descriptors.size_bytes
    assert (scene.data[:size_bytes] == scene.known[:size_bytes]).all()
    assert len(scene.parts) == 2
    assert sum(part.size_bytes for part in scene.parts) == size_bytes
    assert threading.get_ident() not in scene.threads
    ((ran_s, elapsed_s),) = seen
    assert ran_s > 0
    assert elapsed_s > 0


@pytest.mark.parametrize("how", ["short", "alone"])
def test_a_short_read_and_one_that_is_measured_are_read_by_one_thread_and_teach_nothing(
    how: str, scene: Scene
) -> None:
    short, alone = scene.read(size_bytes=2 * THREAD_BYTES - 8), scene.read(alone=True)
    seen = scene.taught()
    scene.transport.post({"short": short, "alone": alone}[how], _go_on)
    assert scene.threads == {threading.get_ident()}
    assert not seen
    assert not scene.transport.takes(scene.read(1, alone=True)), "a run is left to NIXL"


def test_threads_that_gain_nothing_are_not_used_for_the_next_read(scene: Scene) -> None:
    for _ in range(2):
        scene.transport._spreading.saw(0.01, 0.01)
    scene.transport.post(scene.read(), _go_on)
    assert scene.threads == {threading.get_ident()}


def test_a_share_that_fails_is_raised_when_the_other_has_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), threading.Event()
    seen = scene.taught()

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
    assert not seen
