"""The HTTP server of metrics and probes: on a port of its own, for who asks has no certificates.

GET /metrics       Prometheus
GET /healthz       200 while the broker's event loop answers
GET /readyz        the same, and 503 while it drains
GET /              the status page, if it is wanted: unlike the others it tells names
GET /status.json   what it shows

It has a loop and a thread of its own; what it shows is taken on the broker's loop, for all who wait
for the same page at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from restow.broker.addresses import host_and_port
from restow.broker.http.pages import Page, Pages, healthy_page, metrics_page, said
from restow.broker.http.server import Answer, Request, http_server
from restow.broker.rpc.status import cut
from restow.broker.server.hub import Hub
from restow.broker.server.observe.metrics import registry_of
from restow.broker.server.observe.overview import Overview
from restow.broker.server.observe.page_hosts import may_be_asked_as

PATHS = ("/metrics", "/healthz", "/readyz")
HTML = "text/html; charset=utf-8"
JSON = "application/json"
PAGE = Path(__file__).with_name("status_page.html")


class BrokerPages:
    """What is served, each page by a function that runs on the broker's loop."""

    def __init__(
        self,
        hub: Hub,
        status_page: bool,
        named: frozenset[str],
        certificate_end_s: Callable[[], float | None],
    ) -> None:
        """Show a hub; its names only under those ``named``. To be called on its loop."""
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        metrics = metrics_page(registry_of(hub, certificate_end_s))
        pages: dict[str, Page] = dict(zip(PATHS, (metrics, healthy_page, self._ready), strict=True))
        page = PAGE.read_bytes() if status_page else b""
        self.policy = content_policy(page.decode())
        self._named, self._with_names = named, frozenset[str]()
        if status_page:
            overview = Overview(hub)
            self._with_names = frozenset({"/", "/status.json"})
            pages |= {
                "/": lambda: Answer(HTTPStatus.OK, HTML, page),
                "/status.json": lambda: Answer(
                    HTTPStatus.OK, JSON, json.dumps(overview.look()).encode()
                ),
            }
        self._pages = Pages("broker", pages)

    async def answer(self, request: Request) -> Answer:
        """What somebody gets who asks. On the HTTP server's loop."""
        path, host = request.path, request.headers.get("host", "")
        if path in self._with_names and not may_be_asked_as(host, self._named):
            self._loop.call_soon_threadsafe(self._tell_refused, path, host, request.peer)
            words = "this name is not one of --http-hosts: ask by address, or as localhost"
            return said(HTTPStatus.MISDIRECTED_REQUEST, words)
        return await self._pages.answer(request.method, path)

    def _tell_refused(self, path: str, host: str, peer: str) -> None:
        self._hub.said.warning("page refused", path=path, host=cut(host), peer=peer)

    def _ready(self) -> Answer:
        if self._hub.directory.granting.draining:
            return said(HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        return healthy_page()


def content_policy(page: str) -> str:
    """What a browser may do with a page: run what is written in it, and ask the broker."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    }
    own = [f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()]
    rest = ["connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"]
    return "; ".join(["default-src 'none'", *own, *rest])


@contextlib.asynccontextmanager
async def serving(
    listen: str,
    hub: Hub,
    status_page: bool = False,
    hosts: Collection[str] = (),
    certificate_end_s: Callable[[], float | None] = lambda: None,
) -> AsyncIterator[str]:
    """Serve inside the ``async with``, at ``HOST:PORT``; port 0 takes a free one. The address.

    The status page is for those that ask by an address, as localhost or as one of ``hosts``.
    ``certificate_end_s`` tells until when the broker's own certificate is good.

    Raises `ListenError`, and `AddressInvalidError`.
    """
    host, _ = host_and_port(listen)
    named = frozenset(one.lower() for one in (*hosts, host))
    pages = BrokerPages(hub, status_page, named, certificate_end_s)
    headers = {
        "Content-Security-Policy": pages.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def application(request: Request) -> Answer:
        return replace(await pages.answer(request), headers=headers)

    async with http_server(listen, application) as address:
        yield address
