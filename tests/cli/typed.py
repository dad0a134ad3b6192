"""Commands that are typed in this process: quickly, beside engines that live on an event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
import typer.rich_utils  # noqa: F401 - it reads FORCE_COLOR once, when it is imported
from typer.testing import CliRunner, Result

from cli.terminals import STYLES
from restow.broker.cli.main import app, main

Env = Mapping[str, str] | None


def typed(*arguments: object, columns: int | None = None, env: Env = None) -> Result:
    """Type a command on a terminal of ``columns`` columns, or into a pipe."""
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1"} if columns else {"COLUMNS": "80"}
    return CliRunner(env={**terminal, **(env or {})}).invoke(app, [str(word) for word in arguments])


def printed(*arguments: object, columns: int | None = None, env: Env = None) -> str:
    """Return what a command prints, without styles. It must succeed."""
    done = typed(*arguments, columns=columns, env=env)
    assert done.exit_code == 0, done.output or done.exception
    return STYLES.sub("", done.stdout)


def document(*arguments: object, env: Env = None) -> Any:
    """Return the document that a command prints with ``--json``. It must succeed."""
    return json.loads(printed(*arguments, "--json", env=env))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def failed(*arguments: object) -> Outcome:
    """Type a command that fails, as `main` tells it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
        main([str(word) for word in arguments])
    return Outcome(int(str(caught.value.code)), out.getvalue(), err.getvalue())


def reason_of(result: Result) -> str:
    """Return the reason of the error that ended a command; empty if it has none."""
    return str(getattr(result.exception, "reason", ""))


async def typed_aside(*arguments: object, columns: int | None = None, env: Env = None) -> Result:
    """Type a command beside what lives on this event loop."""
    return await asyncio.to_thread(typed, *arguments, columns=columns, env=env)


async def printed_aside(*arguments: object, columns: int | None = None, env: Env = None) -> str:
    """Return what a command prints beside what lives on this event loop. It must succeed."""
    return await asyncio.to_thread(printed, *arguments, columns=columns, env=env)


async def document_aside(*arguments: object, env: Env = None) -> Any:
    """Return the document that a command prints beside what lives on this event loop."""
    return await asyncio.to_thread(document, *arguments, env=env)
