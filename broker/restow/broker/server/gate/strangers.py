"""Limits connections on which no call has been admitted yet (strangers' connections).

gRPC accepts every connection and reports none. So this module finds them among the process's open
files, and shuts down the excess, which looks to gRPC as if the peer had done it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final
from urllib.parse import unquote

import grpc

from restow.broker.logs import get_logger

LOOK_EVERY_S: Final = 0.1
THOROUGHLY_EVERY_S: Final = 1.0
TELL_EVERY_S: Final = 10.0
PAUSE: Final = 20
"""Pause after a look, at least this many times as long as the look."""
PAUSE_UNDER_ATTACK: Final = 4
FILES: Final = "/proc/self/fd"

Address = tuple[str, int]


def address_of(peer: str) -> Address | None:
    """Parse gRPC's name of a peer; None if the peer is not on TCP.

    >>> address_of("ipv4:127.0.0.1:50000"), address_of("ipv6:%5B::1%5D:1"), address_of("unix:")
    (('127.0.0.1', 50000), ('::1', 1), None)
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return _plain(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


def _plain(host: str, port: int) -> Address:
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), port


@dataclass(slots=True)
class _Connection:
    """An open file that was examined; ``address`` None if it is not a client's connection."""

    inode: int
    address: Address | None
    known: bool = False
    """Whether a call on it was admitted, or it was shut down."""

    @property
    def origin(self) -> str:
        """The host that it counts for, or the /64 network of IPv6, which a single host may own."""
        host = self.address[0] if self.address else ""
        return str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host


class Strangers:
    """Limits strangers' connections to a port, on a thread of its own."""

    def __init__(self, connections: int, most: int) -> None:
        """Let at most ``most`` of gRPC's ``connections`` be strangers'."""
        self.ended = 0
        """Number of connections that were shut down."""
        self._connections, self._most = connections, most
        self._admitted: deque[str] = deque()
        self._heard: set[Address | None] = set()
        """Addresses of admitted calls since the last thorough look."""
        self._seen: dict[int, _Connection] = {}
        """Connections by file number, oldest first."""
        self._files: list[str] = []
        self._log = get_logger("restow.guard")

    def admitted(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Note an admitted call."""
        self._admitted.append(context.peer())

    def look(self, port: int, thoroughly: bool = True) -> None:
        """Examine the open files, and shut down excess connections to ``port``.

        Only a ``thorough`` look notices that a file number is now another file.
        """
        while self._admitted:
            self._heard.add(address_of(self._admitted.popleft()))
        files = os.listdir(FILES)
        if thoroughly or files != self._files:
            self._files = files
            self._find({int(name) for name in files}, port, thoroughly)
        strangers = []
        for file, connection in self._seen.items():
            connection.known = connection.known or connection.address in self._heard
            if not connection.known and connection.address is not None:
                strangers.append((file, connection))
        for file, connection in _too_many(strangers, self._most):
            _shut_down(file, connection.inode)
            connection.known = True
            self.ended += 1
        if thoroughly:
            self._heard.clear()

    @contextlib.contextmanager
    def kept_few(self, port: int) -> Iterator[None]:
        """Watch connections to ``port`` inside of the ``with`` block."""
        ends = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(port, ends), name="strangers", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _run(self, port: int, ends: threading.Event) -> None:
        told, told_s, pause_s, thorough_s = 0, 0.0, LOOK_EVERY_S, 0.0
        while not ends.wait(pause_s):
            begun_s, ended, worked_s = time.monotonic(), self.ended, time.thread_time()
            thoroughly = begun_s >= thorough_s
            # No file descriptor may be left to look with; the next look may get a descriptor.
            with contextlib.suppress(OSError):
                self.look(port, thoroughly)
            took_s = time.thread_time() - worked_s
            pause = PAUSE if self.ended == ended else PAUSE_UNDER_ATTACK
            pause_s = max(LOOK_EVERY_S, pause * took_s)
            if thoroughly:
                thorough_s = begun_s + max(THOROUGHLY_EVERY_S, 2 * PAUSE * took_s)
            count = sum(connection.address is not None for connection in self._seen.values())
            if begun_s >= told_s and (self.ended > told or count >= self._connections):
                self._log.warning(
                    "many connections: raise --max-connections if they are engines' and agents'",
                    open=count,
                    most=self._connections,
                    strangers_ended=self.ended - told,
                )
                told, told_s = self.ended, begun_s + TELL_EVERY_S

    def _find(self, files: set[int], port: int, thoroughly: bool) -> None:
        """Forget closed files, and add new files."""
        for file in self._seen.keys() - files:
            del self._seen[file]
        for file in sorted(files if thoroughly else files - self._seen.keys()):
            with contextlib.suppress(OSError):  # closed in the meantime
                inode = os.fstat(file).st_ino
                seen = self._seen.get(file)
                if seen is None or seen.inode != inode:
                    self._seen.pop(file, None)
                    self._seen[file] = _Connection(inode, _client_of(file, inode, port))


def _too_many(strangers: list[tuple[int, _Connection]], most: int) -> list[tuple[int, _Connection]]:
    """Return the ``strangers`` to shut down, from a list that begins with the oldest.

    The newest connection of each origin stays, then the second newest, as long as there is room.
    """
    if len(strangers) <= most:
        return []
    counts: Counter[str] = Counter()
    ranked = []
    for connection in reversed(strangers):
        origin = connection[1].origin
        ranked.append((counts[origin], connection))
        counts[origin] += 1
    ranked.sort(key=itemgetter(0))
    return [connection for _, connection in ranked[most:]]


@contextlib.contextmanager
def _socket_of(file: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield the socket of an open file of gRPC's, or None if the file is no longer that socket."""
    copy = os.dup(file)
    try:
        same = os.fstat(copy).st_ino == inode
        held = socket.socket(fileno=copy) if same else None
    except OSError:
        os.close(copy)
        yield None
        return
    try:
        yield held
    finally:
        os.close(copy) if held is None else held.close()


def _client_of(file: int, inode: int, port: int) -> Address | None:
    """Return the peer of a file that is a connection to ``port``, or None."""
    with _socket_of(file, inode) as held:
        if held is None or held.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            host, peer_port = held.getpeername()[:2]
        except OSError:
            return None
        return _plain(host, peer_port) if held.getsockname()[1] == port else None


def _shut_down(file: int, inode: int) -> None:
    """Shut down a connection, whose file gRPC closes."""
    with contextlib.suppress(OSError), _socket_of(file, inode) as held:
        if held is not None:
            held.shutdown(socket.SHUT_RDWR)
