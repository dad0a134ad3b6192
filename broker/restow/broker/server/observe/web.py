"""The HTTP server of metrics and probes: on a port of its own, for who asks has no certificates.

GET /metrics       Prometheus
GET /healthz       200 while the broker's event loop answers
GET /readyz        the same, and 503 while it drains, stands still, or is not let in by the others'
                   registry
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
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from http import HTTPStatus

from restow.broker.addresses import HTTP_PORT, host_and_port
from restow.broker.http.pages import Page, Pages, Query, healthy_page, metrics_page, said
from restow.broker.http.server import Answer, Request, http_server
from restow.broker.rpc.status import cut
from restow.broker.server.base.hub import Hub
from restow.broker.server.observe.metrics import registry_of
from restow.broker.server.observe.one_handoff import one_handoff
from restow.broker.server.observe.overview import Overview, Values
from restow.broker.server.observe.page_hosts import may_be_asked_as
from restow.broker.server.observe.status_page import status_page_html

PATHS = ("/metrics", "/healthz", "/readyz")
FIELDS = {"/status.json": ("tenant",), "/handoff.json": ("tenant", "id")}
"""Of queries, by path."""
HTML = "text/html; charset=utf-8"
JSON = "application/json"


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
        page = status_page_html() if status_page else ""
        self.policy = content_policy(page)
        self._named, self._with_names = named, frozenset[str]()
        if status_page:
            overview = Overview(hub)
            self._with_names = frozenset({"/", "/status.json", "/handoff.json"})
            pages |= {
                "/": lambda _: Answer(HTTPStatus.OK, HTML, page.encode()),
                "/status.json": lambda query: _json(_overview(overview, query)),
                "/handoff.json": lambda query: _json(one_handoff(hub, query)),
            }
        self._pages = Pages("broker", pages, FIELDS)

    async def answer(self, request: Request) -> Answer:
        """What somebody gets who asks. On the HTTP server's loop."""
        path, host = request.path, request.headers.get("host", "")
        if path in self._with_names and not may_be_asked_as(host, self._named):
            self._loop.call_soon_threadsafe(self._tell_refused, path, host, request.peer)
            words = "this name is not one of --http-hosts: ask by address, or as localhost"
            return said(HTTPStatus.MISDIRECTED_REQUEST, words)
        return await self._pages.answer(request)

    def _tell_refused(self, path: str, host: str, peer: str) -> None:
        self._hub.said.warning("page refused", path=path, host=cut(host), peer=peer)

    def _ready(self, query: Query) -> Answer:
        if self._hub.directory.granting.draining:
            return said(HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        report = self._hub.standing.report()
        if report is not None and report.unready:
            return said(HTTPStatus.SERVICE_UNAVAILABLE, report.unready)
        if report is not None and not report.leadership.epoch:
            return said(HTTPStatus.OK, f"standby: {report.leadership.leader or 'nobody'} leads")
        return healthy_page(query)


def content_policy(page: str) -> str:
    """What a browser may do with a page: run what is written in it, and ask the broker."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    }
    own = [f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()]
    rest = ["connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"]
    return "; ".join(["default-src 'none'", *own, *rest])


def _overview(overview: Overview, query: Query) -> Values | None:
    tenant = query.get("tenant")
    return overview.look(tenant) if tenant is None or overview.knows(tenant) else None


def _json(value: Values | None) -> Answer:
    if value is None:
        return said(HTTPStatus.NOT_FOUND, "no such thing is known here, or not any more")
    return Answer(HTTPStatus.OK, JSON, json.dumps(value).encode())


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
    host, _ = host_and_port(listen, HTTP_PORT)
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
