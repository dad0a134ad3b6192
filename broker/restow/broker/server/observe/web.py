"""The HTTP server of metrics and probes: on a port of its own, for who asks has no certificates.

GET /metrics       Prometheus
GET /healthz       200 while the broker's event loop answers
GET /readyz        the same, and 503 while it drains
GET /              the status page, if it is wanted: unlike the others it tells names
GET /status.json   what it shows; of one tenant with ?tenant=NAME
GET /handoff.json  one handoff with its spans and its timeline: ?tenant=NAME&id=ID

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
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from http import HTTPStatus

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restow.broker.addresses import host_and_port
from restow.broker.rpc.status import cut
from restow.broker.server.hub import Hub
from restow.broker.server.observe.http import Answer, Request, http_server
from restow.broker.server.observe.metrics import registry_of
from restow.broker.server.observe.one_handoff import one_handoff
from restow.broker.server.observe.overview import Overview, Values
from restow.broker.server.observe.page_hosts import may_be_asked_as
from restow.broker.server.observe.status_page import status_page_html

ANSWER_S = 5.0
"""For so long the loop may be busy before a request is told so."""
PATHS = ("/metrics", "/healthz", "/readyz")
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
Query = Mapping[str, str]


class Pages:
    """What is served, each page by a function that runs on the broker's loop."""

    def __init__(self, hub: Hub, status_page: bool, named: frozenset[str] = frozenset()) -> None:
        """Show a hub; its names only under those ``named``. To be called on its loop."""
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._registry = registry_of(hub)
        pages = (self._metrics, self._healthy, self._ready)
        self._pages: dict[str, Callable[[Query], Answer]]
        self._pages = dict(zip(PATHS, pages, strict=True))
        self._made: dict[tuple[str, str, str], Future[Answer]] = {}
        """Pages that are asked for and not yet made."""
        page = status_page_html() if status_page else ""
        self.policy = content_policy(page)
        self._named, self._with_names = named, frozenset[str]()
        if status_page:
            overview = Overview(hub)
            self._with_names = frozenset({"/", "/status.json", "/handoff.json"})
            self._pages |= {
                "/": lambda _: Answer(HTTPStatus.OK, HTML, page.encode()),
                "/status.json": lambda query: _json(_overview(overview, query)),
                "/handoff.json": lambda query: _json(one_handoff(hub, query)),
            }

    async def answer(
        self, method: str, path: str, host: str, peer: str = "", query: Query | None = None
    ) -> Answer:
        """What ``peer`` gets, who asks for it as ``host``. On the HTTP server's loop."""
        page, query = self._pages.get(path), query or {}
        if page is None:
            return _said(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if path in self._with_names and not may_be_asked_as(host, self._named):
            self._loop.call_soon_threadsafe(self._tell_refused, path, host, peer)
            words = "this name is not one of --http-hosts: ask by address, or as localhost"
            return _said(HTTPStatus.MISDIRECTED_REQUEST, words)
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        key = (path, query.get("tenant", ""), query.get("id", ""))
        made = self._made.get(key)
        if made is None:
            try:
                made = asyncio.run_coroutine_threadsafe(_made(page, query), self._loop)
            except RuntimeError:
                return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the broker has ended")
            self._made[key] = made
            made.add_done_callback(lambda _: self._made.pop(key, None))
        done, _ = await asyncio.wait({asyncio.wrap_future(made)}, timeout=ANSWER_S)
        if not done or made.cancelled():
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the broker does not answer")
        return made.result()

    def _tell_refused(self, path: str, host: str, peer: str) -> None:
        self._hub.said.warning("page refused", path=path, host=cut(host), peer=peer)

    def _metrics(self, _: Query) -> Answer:
        return Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _healthy(self, _: Query) -> Answer:
        return _said(HTTPStatus.OK, "ok")

    def _ready(self, _: Query) -> Answer:
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


async def _made(page: Callable[[Query], Answer], query: Query) -> Answer:
    return page(query)


def _overview(overview: Overview, query: Query) -> Values | None:
    tenant = query.get("tenant")
    return overview.look(tenant) if tenant is None or overview.knows(tenant) else None


def _json(value: Values | None) -> Answer:
    if value is None:
        return _said(HTTPStatus.NOT_FOUND, "no such thing is known here, or not any more")
    return Answer(HTTPStatus.OK, JSON, json.dumps(value).encode())


def _said(status: HTTPStatus, words: str) -> Answer:
    return Answer(status, TEXT, f"{words}\n".encode())


@contextlib.asynccontextmanager
async def serving(
    listen: str, hub: Hub, status_page: bool = False, hosts: Collection[str] = ()
) -> AsyncIterator[str]:
    """Serve inside the ``async with``, at ``HOST:PORT``; port 0 takes a free one. The address.

    The status page is for those that ask by an address, as localhost or as one of ``hosts``.

    Raises `ListenError`, and `AddressInvalidError`.
    """
    host, _ = host_and_port(listen)
    pages = Pages(hub, status_page, frozenset(one.lower() for one in (*hosts, host)))
    headers = {
        "Content-Security-Policy": pages.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def application(request: Request) -> Answer:
        asked_as = request.headers.get("host", "")
        answer = await pages.answer(
            request.method, request.path, asked_as, request.peer, request.query
        )
        return replace(answer, headers=headers)

    async with http_server(listen, application) as address:
        yield address
