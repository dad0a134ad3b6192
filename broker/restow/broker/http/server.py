"""Serve metrics, probes and pages over HTTP, on an event loop and a thread of their own.

A page is made on the event loop of the process that it shows. That loop may be busy, and a probe
must learn this within a bounded time. The server therefore has a loop of its own, asks the other
loop for each page, and answers 503 when the page does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restow.broker.addresses import HTTP_PORT, host_and_port
from restow.broker.errors import ListenError

MAX_OPEN: Final = 64
"""Most open connections. A new connection closes the oldest, so that probes are always let in."""
IDLE_S: Final = 10.0
"""A connection without requests is closed after this time."""
STOP_S: Final = 0.5
"""When the server ends: time for answers under way, and again until they are cancelled."""

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold the answer to a request."""

    status: HTTPStatus
    media_type: str
    body: bytes


Page = Callable[[Query], Answer]


class HttpPages:
    """Answer requests with pages, each made once for all who wait for it."""

    def __init__(
        self,
        process: str,
        pages: Mapping[str, Page],
        fields: Mapping[str, Collection[str]],
        answer_s: float = 5.0,
    ) -> None:
        """Serve ``pages`` by path, made on the loop that runs now; ``process`` is its name.

        ``fields`` are the names that a page reads of its query, by path. The others are dropped:
        a caller who varies them does not have the page made again. A page that is not made within
        ``answer_s`` is answered with 503.
        """
        self._process, self._pages, self._fields = process, dict(pages), dict(fields)
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._made: dict[tuple[str, tuple[tuple[str, str], ...]], Future[Answer]] = {}
        """Pages that are being made, by path and query."""

    async def answer(self, method: str, path: str, query: Query) -> Answer:
        """Return the answer to a request. Called on the server's loop."""
        page = self._pages.get(path)
        if page is None:
            return line(HTTPStatus.NOT_FOUND, f"the pages are {', '.join(self._pages)}")
        if method not in ("GET", "HEAD"):
            return line(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        used = {name: query[name] for name in self._fields.get(path, ()) if name in query}
        key = path, tuple(used.items())
        made = self._made.get(key)
        if made is None:
            try:
                made = asyncio.run_coroutine_threadsafe(_made(page, used), self._loop)
            except RuntimeError:
                return line(HTTPStatus.SERVICE_UNAVAILABLE, f"the {self._process} has ended")
            self._made[key] = made
            made.add_done_callback(lambda _: self._made.pop(key, None))
        done, _ = await asyncio.wait({asyncio.wrap_future(made)}, timeout=self._answer_s)
        if not done or made.cancelled():
            return line(HTTPStatus.SERVICE_UNAVAILABLE, f"the {self._process} does not answer")
        return made.result()


async def _made(page: Page, query: Query) -> Answer:
    return page(query)


def metrics_page(registry: CollectorRegistry) -> Page:
    """Return a page that shows a registry to Prometheus."""
    return lambda _: Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))


def healthy_page(_: Query) -> Answer:
    """Answer a probe: the loop that makes this page runs."""
    return line(HTTPStatus.OK, "ok")


def line(status: HTTPStatus, words: str) -> Answer:
    """Return an answer of one line of text."""
    return Answer(status, "text/plain; charset=utf-8", f"{words}\n".encode())


Answering = Callable[[web.BaseRequest], Awaitable[Answer]]


@contextlib.asynccontextmanager
async def http_server(
    listen: str, answering: Answering, headers: Mapping[str, str]
) -> AsyncIterator[str]:
    """Serve inside the ``async with``, and yield the address; port 0 takes a free port.

    ``answering`` runs on the server's loop, and ``headers`` stand in each of its answers.

    Raises:
        ListenError: the address can't be listened on.
        AddressInvalidError: ``listen`` is no HOST:PORT.

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
    loop, ends = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(held, answering, headers, ends))

    thread = threading.Thread(target=run, name="observe", daemon=True)
    thread.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{held.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(ends.set)
        # A page that is being made needs the caller's loop: it must not be blocked here.
        await asyncio.to_thread(thread.join)


async def _serve(
    held: socket.socket, answering: Answering, headers: Mapping[str, str], ends: asyncio.Event
) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = await answering(request)
        fields = {"Content-Type": answer.media_type, "Server": "restow", **headers}
        return web.Response(body=answer.body, status=answer.status, headers=fields)

    # A stranger must not be able to fill the log with requests that are not HTTP.
    logger = logging.getLogger("restow.http")
    logger.addFilter(_not_the_callers)
    server = _BoundedServer(handle, access_log=None, logger=logger, keepalive_timeout=IDLE_S)
    listening = await asyncio.get_running_loop().create_server(server, sock=held)
    await ends.wait()
    listening.close()
    await server.shutdown(STOP_S)


class _BoundedServer(web.Server):  # type: ignore[misc]
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Let a connection in, and close the oldest connections beyond `MAX_OPEN`."""
        super().connection_made(handler, transport)
        for oldest in self.connections[:-MAX_OPEN]:
            if oldest.transport is not None:
                oldest.transport.abort()


def _not_the_callers(record: logging.LogRecord) -> bool:
    """Return whether a log record is of an error of ours, and not of what a caller sent."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
