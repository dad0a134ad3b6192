"""``restow store`` as a process: the broker knows it as an engine, and it says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest

from broker.fakes import model_layout
from cli.broker_process import broker_process, run_restow
from forked.commands import begin
from restow.broker.client import AdminClient, BlockingSession
from restow.broker.layout.json_form import layout_to_json

pytestmark = pytest.mark.sampled


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(layout_to_json(model_layout(tp=2))))
    return path


WAITS = "waiting for an engine to register"


@contextmanager
def running(*options: str, says: str = "store ready") -> Iterator[tuple[BaseProcess, TextIO]]:
    """Run a store until it says something; yield its process, and what it says later."""
    reader, writer = os.pipe()
    with open(reader) as lines:
        process = begin(("store", "--memory", "64MiB", *options), (0, 1, writer))
        os.close(writer)
        try:
            said: list[str] = []
            while says not in "".join(said[-1:]):
                said.append(lines.readline())
                assert said[-1], "".join(said)
            yield process, lines
        finally:
            process.kill()
            process.join()


def end(process: BaseProcess) -> None:
    """Tell a store to end; it ends well."""
    process.terminate()
    process.join(30)
    assert process.exitcode == 0


def test_the_broker_knows_it_as_an_engine(layout: Path) -> None:
    with broker_process() as address, AdminClient(address) as admin:
        with running("--layout", str(layout), "--broker", address) as (process, _):
            (engine,) = admin.engines()
            assert (engine.engine_id, engine.ranks) == ("store", 1)
            assert len(admin.agents()) == 1
            end(process)
        assert not admin.engines()


def test_of_two_with_one_id_the_later_one_stays(layout: Path) -> None:
    with broker_process() as address, AdminClient(address) as admin:
        given = ("--layout", str(layout), "--broker", address)
        with running(*given) as (first, lines), running(*given) as (second, _):
            first.join(30)
            assert first.exitcode
            assert "error: ENGINE_REPLACED: engine store registered anew" in lines.read()
            (engine,) = admin.engines()
            assert engine.engine_id == "store"
            assert second.is_alive()


def test_another_stores_folder_and_another_programs_are_left_alone(
    layout: Path, tmp_path: Path
) -> None:
    with broker_process() as address:
        given = ("--layout", str(layout), "--broker", address)
        disk = ("--memory", "64MiB", "--disk-size", "1MiB", "--disk", str(tmp_path / "disk"))
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
        running("--engine", "p", "--broker", address, says=WAITS) as (process, lines),
        BlockingSession("p", "a life", model_layout(tp=2), address),
    ):
        assert any("store ready" in line for line in lines)
        with AdminClient(address) as admin:
            taken, stored = admin.layout("p"), admin.layout("store")
        assert (len(taken.ranks), len(stored.ranks)) == (2, 1)
        assert stored.model.identity == taken.model.identity
        end(process)


def test_it_ends_while_it_waits() -> None:
    with (
        broker_process() as address,
        running("--engine", "p", "--broker", address, says=WAITS) as (process, _),
    ):
        end(process)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give one of them"),
        (("--layout", "LAYOUT", "--engine", "p"), "give one of them"),
        (("--layout", "LAYOUT", "--memory", "8 gigs"), "is no size: write it like 8GiB"),
        (("--layout", "LAYOUT", "--memory", "0"), "less than a byte"),
        (("--layout", "LAYOUT", "--memory", "1kB"), "are too few"),
        (("--layout", "LAYOUT", "--disk", "there"), "--disk and --disk-size go together"),
        (
            ("--layout", "LAYOUT", "--disk", "/proc/there", "--disk-size", "1GB"),
            "can't keep states",
        ),
    ],
)
def test_it_says_what_is_wrong(layout: Path, options: tuple[str, ...], words: str) -> None:
    given = [str(layout) if option == "LAYOUT" else option for option in options]
    ended = run_restow("store", "--memory", "64MiB", *given)
    assert ended.returncode != 0
    assert words in " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
