"""``restow store`` as a process: the broker knows it as an engine, and it says what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.fakes import model_layout
from cli.broker_process import broker_process, run_restow
from restow.broker.client import AdminClient
from restow.broker.layout.json_form import layout_to_json


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(layout_to_json(model_layout(tp=2))))
    return path


@contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a store until it says that it is ready."""
    command = [sys.executable, "-m", "restow.broker.cli.main", "store", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "store ready" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_broker_knows_it_as_an_engine(layout: Path) -> None:
    with broker_process() as broker, AdminClient(broker) as admin:
        with running("--layout", str(layout), "--memory", "64MiB", "--broker", broker) as process:
            (engine,) = admin.engines()
            assert (engine.engine_id, engine.ranks) == ("store", 1)
            assert len(admin.agents()) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert not admin.engines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "8 gigs"), "is no size: write it like 8GiB"),
        (("--memory", "0"), "less than a byte"),
        (("--memory", "1kB"), "are too few"),
        (("--memory", "64MiB", "--disk", "there"), "--disk and --disk-size go together"),
        (("--memory", "64MiB", "--disk", "/proc/there", "--disk-size", "1GB"), "keeps no states"),
    ],
)
def test_it_says_what_is_wrong(layout: Path, options: tuple[str, ...], words: str) -> None:
    ended = run_restow("store", "--layout", str(layout), *options)
    assert ended.returncode != 0
    assert words in " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
