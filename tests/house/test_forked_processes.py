"""Tests' processes see the environment of their own test, whoever started their server."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

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
