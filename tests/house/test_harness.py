"""What tests rely on: processes see their own test's environment, and a free port stays free."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from forked.ports import free_port
from forked.server import pipe, start

NAME = "RESTOW_TLS_CA"


def say(answers: Connection) -> None:
    answers.send(os.environ.get(NAME))


def seen() -> str | None:
    ours, theirs = pipe()
    process = start(say, theirs)
    theirs.close()
    answer: str | None = ours.recv()
    process.join()
    ours.close()
    return answer


def test_an_environment_ends_with_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(NAME, "of a test")
        assert seen() == "of a test"
    assert seen() is None


def test_none_twice_and_none_that_a_connection_may_take() -> None:
    range_of_connections = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < int(range_of_connections[0])
