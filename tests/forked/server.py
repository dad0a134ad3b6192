"""Processes forked from a server that has imported torch and NIXL already, and used neither.

A test need not wait for the imports then. The server is started once, in the middle of some test:
what that test had put into its environment must not reach the processes of those after it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    *("restow.agents.agent", "restow.agents.daemon.server", "restow.broker.client"),
    *("restow.broker.cli.main", "restow.broker.cli.views.tables", "restow.broker.server.serve"),
    *("restow.broker.families.hf", "restow.broker.draw.picture"),
]


def pipe() -> tuple[Connection, Connection]:
    """Return the two ends of a new pipe."""
    return _CONTEXT.Pipe()


def start(
    main: Callable[..., object], *args: object, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Run ``main(*args)`` in a new process, by default with this process's environment.

    The fork server can import what is installed; only its forks can import what lies beside the
    tests.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    own = dict(os.environ if environment is None else environment)
    process = _CONTEXT.Process(target=_run, args=(main, own, args), daemon=True)
    process.start()
    return process


def _run(main: Callable[..., object], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    main(*args)
