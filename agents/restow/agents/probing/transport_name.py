"""Find the transport over which UCX reads a peer, by reading once in another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

from restow.agents.memory.errors import ReadFailedError
from restow.agents.probing.transport_probe import OneRead

START_S = 30.0
"""Time for a process to import NIXL on a busy machine."""
_ROW = re.compile(r"\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|\s*$")
_READS = "remote memory read by ucp_get"
_TITLE = re.compile(r"\| (?P<own>\S+ self )?.*cfg#\d+")


class TransportName(NamedTuple):
    """The way in which UCX reads a peer, from its log."""

    transport: str
    """Transport and device, as ``cma/memory`` or ``rc_mlx5/mlx5_0:1``."""
    method: str
    """Method, as ``zero-copy`` or ``software emulation``."""


def find_transport(read: OneRead, metadata: bytes) -> TransportName:
    """Read once and return how; blocks.

    Raises what the read raises, and `ReadFailedError` if UCX does not log its transport.
    """
    environment = {**os.environ, "UCX_PROTO_INFO": "y"}
    environment.pop("UCX_LOG_FILE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "restow.agents.probing.transport_probe"],
            input=read.as_line() + metadata,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=START_S + read.within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReadFailedError(f"the read from agent {read.peer} did not end in time") from None
    log = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ReadFailedError(_why(log, read.peer, done.returncode))
    found = transport_in(log)
    if found is None:
        raise ReadFailedError(f"UCX did not log how it read from agent {read.peer}")
    return found


def transport_in(log: str) -> TransportName | None:
    """Return the last transport that a log of UCX_PROTO_INFO has for long reads of other processes.

    >>> transport_in('''
    ... | examiner intra-node cfg#1                               |
    ... | remote memory read by ucp_get*(multi) into host memory  |
    ... +--------+--------------------+---------------------------+
    ... | Range  |    Description     |          Config           |
    ... +--------+--------------------+---------------------------+
    ... | 0..256 | short              | tcp/lo                    |
    ... | 257..inf | software emulation | tcp/eth0                |
    ... +--------+--------------------+---------------------------+
    ... | examiner self cfg#0                                     |
    ... | remote memory read by ucp_get*(multi) into host memory  |
    ... +--------+--------------------+---------------------------+
    ... | 0..inf | zero-copy          | cma/memory                |
    ... +--------+--------------------+---------------------------+
    ... ''')
    TransportName(transport='tcp/eth0', method='software emulation')
    """
    found, other, reads = None, False, False
    for line in log.splitlines():
        title = _TITLE.search(line)
        if title is not None:
            other, reads = title["own"] is None, False
        elif "|" in line and _READS in line:
            reads = other
        elif reads and (row := _ROW.search(line)) and row[1].endswith("..inf"):
            found, reads = TransportName(row[3], row[2]), False
    return found


def _why(log: str, peer: str, status: int) -> str:
    """Return the process's last words, or its exit status."""
    try:
        reason, words = json.loads(log.splitlines()[-1])
    except (IndexError, ValueError):
        return f"the process that was to read from agent {peer} ended with status {status}"
    return f"{reason}: {words}"
