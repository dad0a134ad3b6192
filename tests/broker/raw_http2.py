"""Connections that speak as much of HTTP/2 as a stranger needs, and keep no rule of gRPC's."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import defaultdict
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
END_STREAM, END_HEADERS = 1, 4
FIRST_WINDOW_BYTES = 65535
MESSAGE_BYTES = 15 << 20


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    head = struct.pack(">IBI", len(body) << 8 | kind, flags, stream)
    return head + body


def headers_of(path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    pairs = (
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in pairs
    )


class RawConnection:
    """One connection; what it hears changes nothing but its windows."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection((host, int(port)), 10)
        self._socket = context.wrap_socket(plain)
        self._initial = self._room = FIRST_WINDOW_BYTES
        self._windows: dict[int, int] = defaultdict(lambda: self._initial)
        self.max_streams = 1000
        self._heard = b""
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.hear(0.2)

    def begin(self, path: str, streams: int, *metadata: tuple[str, str]) -> list[int]:
        """Begin as many calls as the other side lets it."""
        numbers = [2 * one + 1 for one in range(min(streams, self.max_streams))]
        for number in numbers:
            self._socket.sendall(frame(HEADERS, END_HEADERS, number, headers_of(path, metadata)))
        return numbers

    def send_messages(self, streams: list[int], most_s: float = 5.0) -> int:
        """Send 15 of 16 MiB of a message on each stream, as far as there is room.

        Return how many bytes were sent.
        """
        left = dict.fromkeys(streams, MESSAGE_BYTES)
        begun: set[int] = set()
        sent, until_s = 0, time.monotonic() + most_s
        while any(left.values()) and time.monotonic() < until_s:
            before = sent
            for number in streams:
                size = min(self._windows[number], self._room, left[number], 16384)
                if size < 5:
                    continue
                body = b"\0" + struct.pack(">I", 16 << 20) if number not in begun else b""
                begun.add(number)
                self._socket.sendall(frame(DATA, 0, number, body.ljust(size, b"x")))
                self._windows[number] -= size
                self._room -= size
                left[number] -= size
                sent += size
            if not self.hear(0.001 if sent > before else 0.3) and sent == before:
                break
        return sent

    def hear(self, wait_s: float) -> bool:
        """Read what comes; return whether anything did."""
        heard = False
        self._socket.settimeout(wait_s)
        with contextlib.suppress(TimeoutError):
            while data := self._socket.recv(1 << 16):
                heard = True
                self._heard += data
                self._take_frames()
        self._socket.settimeout(10)
        return heard

    def close(self) -> None:
        self._socket.close()

    def _take_frames(self) -> None:
        while len(self._heard) >= 9:
            size = int.from_bytes(self._heard[:3])
            if len(self._heard) < 9 + size:
                return
            kind, flags = self._heard[3], self._heard[4]
            stream, body = int.from_bytes(self._heard[5:9]), self._heard[9 : 9 + size]
            self._heard = self._heard[9 + size :]
            match kind:
                case 8 if stream == 0:
                    self._room += int.from_bytes(body)
                case 8:
                    self._windows[stream] += int.from_bytes(body)
                case 4 if not flags:
                    self._settle(body)
                case 6 if not flags:
                    self._socket.sendall(frame(PING, 1, 0, body))
                case 3:
                    self._windows[stream] = -(2**40)
                case 1 if flags & END_STREAM:
                    self._windows[stream] = -(2**40)

    def _settle(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == 3:
                self.max_streams = value
            if name == 4:
                for stream in self._windows:
                    self._windows[stream] += value - self._initial
                self._initial = value
        self._socket.sendall(frame(SETTINGS, 1, 0))


@contextlib.contextmanager
def raw_connection(address: str) -> Iterator[RawConnection]:
    connection = RawConnection(address)
    try:
        yield connection
    finally:
        connection.close()
