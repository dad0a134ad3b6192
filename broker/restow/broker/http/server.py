"""A small HTTP server on an event loop and a thread of its own: whoever holds it up, others don't.

It answers one request on each connection, and has so few open that probes find room at any time:
the oldest makes room for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl

from restow.broker.addresses import HTTP_PORT, host_and_port
from restow.broker.errors import ListenError

MAX_OPEN: Final = 64
MAX_HEAD_BYTES: Final = 8 << 10
MAX_FIELDS: Final = 8
"""Of a query."""
WHOLE_S: Final = 10.0
"""For so long a connection may take, from its first byte to its last."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    peer: str
    """The address of who asks."""
    query: Mapping[str, str]
    """What is asked for in detail; of a name that is given twice, the last value."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said."""

    status: HTTPStatus
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Application = Callable[[Request], Awaitable[Answer]]


def request_of(head: bytes, peer: str = "") -> Request | None:
    r"""The request whose head this is; None: it is none.

    >>> request_of(b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n")
    Request(method='GET', path='/a', headers={'host': 'x'}, peer='', query={})
    >>> request_of(b"GET /a?b=%2Fc&d HTTP/1.1").query
    {'b': '/c'}
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    parted = [line.partition(":") for line in lines if line]
    headers = {name.strip().lower(): value.strip() for name, _, value in parted}
    path, _, query = words[1].partition("?")
    try:
        named = dict(parse_qsl(query, max_num_fields=MAX_FIELDS))
    except ValueError:  # too many
        return None
    return Request(words[0], path, headers, peer, named)


@contextlib.asynccontextmanager
async def http_server(listen: str, application: Application) -> AsyncIterator[str]:
    """Serve inside the ``async with``, at ``HOST:PORT``; port 0 takes a free one. The address.

    ``application`` runs on the server's own loop. Raises `ListenError`, and `AddressInvalidError`.
    """
    host, port = host_and_port(listen, HTTP_PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        held = socket.create_server((host, port), family=family, backlog=MAX_OPEN)
    except OSError as error:
        raise ListenError(
            f"can't show metrics on {listen}: is it in use, or not an address of this machine? "
            f"({error})",
            listen=listen,
        ) from None
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()
    thread = threading.Thread(
        target=_run, args=(loop, held, application, ends), name="observe", daemon=True
    )
    thread.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{held.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(ends.set)
        # It may wait for the caller's loop, which this must not hold up.
        await asyncio.to_thread(thread.join)


def _run(
    loop: asyncio.AbstractEventLoop,
    held: socket.socket,
    application: Application,
    ends: asyncio.Event,
) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_serve(held, application, ends))


async def _serve(held: socket.socket, application: Application, ends: asyncio.Event) -> None:
    served: dict[asyncio.StreamWriter, None] = {}
    """The oldest first."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(served) >= MAX_OPEN:
            oldest = next(iter(served))
            del served[oldest]
            oldest.transport.abort()
        served[writer] = None
        try:
            async with asyncio.timeout(WHOLE_S):
                await _answer(reader, writer, application)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:  # also of a page that could not be made
            served.pop(writer, None)
            writer.transport.abort()

    server = await asyncio.start_server(connected, sock=held, limit=MAX_HEAD_BYTES)
    await ends.wait()
    server.close()
    for writer in served:
        writer.transport.abort()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, application: Application
) -> None:
    try:
        peer = str(writer.get_extra_info("peername", ("",))[0])
        request = request_of(await reader.readuntil(b"\r\n\r\n"), peer)
    except asyncio.LimitOverrunError:
        request = None
    if request is None:
        answer = Answer(HTTPStatus.BAD_REQUEST, "text/plain", b"no request of HTTP/1.1\n")
    else:
        answer = await application(request)
    status = answer.status
    headers = {
        "Content-Type": answer.media_type,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    body = b"" if request is not None and request.method == "HEAD" else answer.body
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()
