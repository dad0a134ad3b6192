"""Ports for servers that must be told theirs before they listen, and keep it over a restart."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_FIRST, _END = 20_000, 32_000
"""Below those that the system gives to whoever connects: one of those may be taken, between being
chosen and being listened at, by any connection of another test."""


def _all() -> Iterator[int]:
    """Yield each port once, beginning where no other process is likely to begin."""
    yield from range(_FIRST + os.getpid() * 97 % (_END - _FIRST), _END)
    yield from range(_FIRST, _END)


_LEFT = _all()


def free_port() -> int:
    """Return a port that nobody listens at, and that this process was never given before."""
    for port in _LEFT:
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            return port
    raise RuntimeError("no port is free")
