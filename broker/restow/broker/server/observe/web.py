"""The HTTP server of metrics and probes: on a port of its own, for who asks has no certificates.

GET /metrics       Prometheus
GET /healthz       200 while the broker's event loop answers
GET /readyz        the same, and 503 while it drains
GET /              the status page, if it is wanted: unlike the others it tells names
GET /status.json   what it shows

It runs in threads of its own; what it shows is taken on the broker's loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restow.broker.addresses import host_and_port
from restow.broker.errors import ListenError
from restow.broker.server.hub import Hub
from restow.broker.server.observe.metrics import registry_of
from restow.broker.server.observe.overview import Overview

ANSWER_S = 5.0
"""For so long the loop may be busy before a request is told so."""
PATHS = ("/metrics", "/healthz", "/readyz")
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
PAGE = Path(__file__).with_name("status_page.html")
Answer = tuple[HTTPStatus, str, bytes]


class Pages:
    """What is served, each page by a function that runs on the broker's loop."""

    def __init__(self, hub: Hub, status_page: bool) -> None:
        """Show a hub. To be called on its loop."""
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._registry = registry_of(hub)
        pages: tuple[Callable[[], Answer], ...] = (self._metrics, self._healthy, self._ready)
        self._pages = dict(zip(PATHS, pages, strict=True))
        page = PAGE.read_bytes() if status_page else b""
        self.policy = content_policy(page.decode())
        if status_page:
            overview = Overview(hub)
            self._pages |= {
                "/": lambda: (HTTPStatus.OK, HTML, page),
                "/status.json": lambda: (HTTPStatus.OK, JSON, json.dumps(overview.look()).encode()),
            }

    def answer(self, method: str, path: str) -> Answer:
        """From any thread."""
        page = self._pages.get(path)
        if page is None:
            return _said(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        try:
            return asyncio.run_coroutine_threadsafe(_made(page), self._loop).result(ANSWER_S)
        except (FutureTimeoutError, RuntimeError):
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the broker does not answer")

    def _metrics(self) -> Answer:
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def _healthy(self) -> Answer:
        return _said(HTTPStatus.OK, "ok")

    def _ready(self) -> Answer:
        if self._hub.directory.granting.draining:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        return _said(HTTPStatus.OK, "ok")


def content_policy(page: str) -> str:
    """What a browser may do with a page: run what is written in it, and ask the broker."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    }
    own = [f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()]
    rest = ["connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"]
    return "; ".join(["default-src 'none'", *own, *rest])


async def _made(page: Callable[[], Answer]) -> Answer:
    return page()


def _said(status: HTTPStatus, words: str) -> Answer:
    return status, TEXT, f"{words}\n".encode()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """As the base has it, but for a look into DNS, which may take long where there is none."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds."""


@contextlib.asynccontextmanager
async def serving(listen: str, hub: Hub, status_page: bool = False) -> AsyncIterator[str]:
    """Serve inside the ``async with``, at ``HOST:PORT``; port 0 takes a free one. The address.

    Raises `ListenError`, and `AddressInvalidError`.
    """
    pages = Pages(hub, status_page)

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        status, media_type, body = pages.answer(method, path)
        headers = [
            ("Content-Type", media_type),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", pages.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ]
        start(f"{status.value} {status.phrase}", headers)
        return [] if method == "HEAD" else [body]

    host, port = host_and_port(listen)
    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, application, kind, _Handler)
    except OSError as error:
        raise ListenError(
            f"can't show metrics on {listen}: is it in use, or not an address of this machine? "
            f"({error})",
            listen=listen,
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="observe", daemon=True)
    thread.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{server.server_port}"
    finally:
        # It may wait for the loop, which this must not hold up.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
