"""``restow store`` as a process: the broker knows it as an engine, and it says what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from broker.fakes import model_layout
from cli.broker_process import broker_process, run_restow
from restow.broker.client import AdminClient, BlockingSession
from restow.broker.layout.json_form import layout_to_json

pytestmark = pytest.mark.sampled


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(layout_to_json(model_layout(tp=2))))
    return path


def running(*options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a store until it says that it is ready."""
    return until_it_says("store ready", *options)


def waiting(*options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a store until it says that it waits."""
    return until_it_says("waiting for an engine to register", *options)


@contextmanager
def until_it_says(words: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a store until it writes a line."""
    command = [sys.executable, "-m", "restow.broker.cli.main", "store", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if words in line:
                break
        else:
            raise AssertionError("".join(said))
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_broker_knows_it_as_an_engine(layout: Path) -> None:
    with broker_process() as address, AdminClient(address) as admin:
        given = ("--layout", str(layout), "--memory", "64MiB", "--broker", address)
        with running(*given) as process:
            (engine,) = admin.engines()
            assert (engine.engine_id, engine.ranks) == ("store", 1)
            assert len(admin.agents()) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert not admin.engines()


def test_of_two_with_one_id_the_later_one_stays(layout: Path) -> None:
    with broker_process() as address, AdminClient(address) as admin:
        given = ("--layout", str(layout), "--memory", "64MiB", "--broker", address)
        with running(*given) as first, running(*given) as second:
            assert first.stderr is not None
            assert first.wait(30) != 0
            assert "error: ENGINE_REPLACED: engine store registered anew" in first.stderr.read()
            (engine,) = admin.engines()
            assert engine.engine_id == "store"
            assert second.poll() is None


def test_another_stores_folder_and_another_programs_are_left_alone(
    layout: Path, tmp_path: Path
) -> None:
    with broker_process() as address:
        given = ("--layout", str(layout), "--memory", "64MiB", "--broker", address)
        disk = ("--disk-size", "1MiB", "--disk", str(tmp_path / "disk"))
        with running(*given, *disk):
            second = run_restow("store", *given, *disk, "--engine-id", "another")
            assert second.returncode != 0
            assert "give each store its own folder" in " ".join(second.stderr.split())
        journal = tmp_path / "disk" / "journal"
        journal.write_text("a text of somebody's\n")
        other = run_restow("store", *given, *disk)
        assert other.returncode != 0
        assert "the folder may be another program's" in " ".join(other.stderr.split())
        assert journal.read_text() == "a text of somebody's\n"


def test_it_waits_for_an_engine_and_takes_its_layout() -> None:
    with (
        broker_process() as address,
        waiting("--engine", "p", "--memory", "64MiB", "--broker", address) as process,
        BlockingSession("p", "a life", model_layout(tp=2), address),
    ):
        assert process.stderr is not None
        assert any("store ready" in line for line in process.stderr)
        with AdminClient(address) as admin:
            taken, stored = admin.layout("p"), admin.layout("store")
        assert (len(taken.ranks), len(stored.ranks)) == (2, 1)
        assert stored.model.identity == taken.model.identity
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_it_ends_while_it_waits() -> None:
    with (
        broker_process() as address,
        waiting("--engine", "p", "--memory", "64MiB", "--broker", address) as process,
    ):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


ANOTHER_THREAD_HEARS_IT = """
import queue, signal, threading
from restow.agents.store.cli import end_of
ends = queue.SimpleQueue()
signal.signal(signal.SIGTERM, lambda *_: ends.put(None))
def hear():
    threading.Event().wait(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=hear).start()
assert end_of(ends) is None
"""


def test_a_signal_that_does_not_end_the_wait_is_heard() -> None:
    subprocess.run([sys.executable, "-c", ANOTHER_THREAD_HEARS_IT], check=True, timeout=60)


def test_one_of_layout_and_engine_is_given(layout: Path) -> None:
    for options in ((), ("--layout", str(layout), "--engine", "p")):
        ended = run_restow("store", "--memory", "64MiB", *options)
        assert ended.returncode != 0
        assert "give one of them" in " ".join(ended.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "8 gigs"), "is no size: write it like 8GiB"),
        (("--memory", "0"), "less than a byte"),
        (("--memory", "1kB"), "are too few"),
        (("--memory", "64MiB", "--disk", "there"), "--disk and --disk-size go together"),
        (("--memory", "64MiB", "--disk", "/proc/there", "--disk-size", "1GB"), "can't keep states"),
    ],
)
def test_it_says_what_is_wrong(layout: Path, options: tuple[str, ...], words: str) -> None:
    ended = run_restow("store", "--layout", str(layout), *options)
    assert ended.returncode != 0
    assert words in " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
