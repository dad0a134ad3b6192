"""Serve metrics, probes and the status page on a port of their own: a caller needs no certificate.

GET /metrics       Prometheus
GET /healthz       200 while the broker's event loop answers
GET /readyz        the same, and 503 while it drains, stands still, is not let in by the others'
                   registry, or has known no leader for some seconds; a standby says who leads
GET /              the status page, with --status-page: unlike the others it tells names
GET /status.json   what the page draws; ?tenant=NAME: of a tenant
GET /handoff.json  what the page draws of a handoff: ?tenant=NAME&id=ID
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from restow.broker.addresses import HTTP_PORT, host_and_port
from restow.broker.display.documents import Values
from restow.broker.http.server import (
    Answer,
    HttpPages,
    Page,
    Query,
    healthy_page,
    http_server,
    line,
    metrics_page,
)
from restow.broker.rpc.status import cut
from restow.broker.server.base.hub import Hub
from restow.broker.server.observe.metrics import registry_of
from restow.broker.server.observe.status import StatusPage

PATHS = ("/metrics", "/healthz", "/readyz")
WITH_NAMES = ("/", "/status.json", "/handoff.json")
FIELDS = {"/status.json": ("tenant",), "/handoff.json": ("tenant", "id")}
"""Names that pages read of a query."""
FOLDER: Final = Path(__file__).with_name("page")
SCRIPTS: Final = ("marks", "charts", "engines", "pairs", "tables", "gantt", "main")
"""Each script uses what the scripts before it define."""


@contextlib.asynccontextmanager
async def serving(
    listen: str,
    hub: Hub,
    status_page: bool = False,
    hosts: Collection[str] = (),
    certificate_end_s: Callable[[], float | None] = lambda: None,
) -> AsyncIterator[str]:
    """Serve inside the ``async with``, and yield the address; port 0 takes a free port.

    The status page is for callers that ask by an address, as localhost or by a name in ``hosts``.
    ``certificate_end_s`` returns the end of the broker's own certificate.

    Raises:
        ListenError: the address can't be listened on.
        AddressInvalidError: ``listen`` is no HOST:PORT.

    """
    host, _ = host_and_port(listen, HTTP_PORT)
    named = frozenset(name.lower() for name in (*hosts, host))
    loop, document = asyncio.get_running_loop(), status_page_html() if status_page else ""
    pages = HttpPages("broker", _pages(hub, document, certificate_end_s), FIELDS)

    def tell_refused(path: str, asked_as: str, peer: str) -> None:
        hub.said.warning("page refused", path=path, host=cut(asked_as), peer=peer)

    async def answering(request: web.BaseRequest) -> Answer:
        path, asked_as = request.rel_url.raw_path, request.headers.get("Host", "")
        if document and path in WITH_NAMES and not may_be_asked_as(asked_as, named):
            loop.call_soon_threadsafe(tell_refused, path, asked_as, request.remote or "")
            words = "this name is not in --http-hosts: ask by address, or as localhost"
            return line(HTTPStatus.MISDIRECTED_REQUEST, words)
        return await pages.answer(request.method, path, request.query)

    headers = {
        "Content-Security-Policy": content_policy(document),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    async with http_server(listen, answering, headers) as address:
        yield address


def _pages(
    hub: Hub, document: str, certificate_end_s: Callable[[], float | None]
) -> Mapping[str, Page]:
    """Return the pages by path; those of the status page only if there is a ``document``."""

    def ready(query: Query) -> Answer:
        report = hub.standing.report()
        if hub.directory.granting.draining:
            return line(HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        if report is not None and report.unready:
            return line(HTTPStatus.SERVICE_UNAVAILABLE, report.unready)
        if report is not None and not report.leadership.epoch:
            return line(HTTPStatus.OK, f"standby: {report.leadership.leader or 'nobody'} leads")
        return healthy_page(query)

    metrics = metrics_page(registry_of(hub, certificate_end_s))
    pages: dict[str, Page] = dict(zip(PATHS, (metrics, healthy_page, ready), strict=True))
    if document:
        shown = StatusPage(hub)
        whole = Answer(HTTPStatus.OK, "text/html; charset=utf-8", document.encode())
        made = (lambda _: whole, _json_page(shown.look), _json_page(shown.handoff))
        pages |= zip(WITH_NAMES, made, strict=True)
    return pages


def _json_page(look: Callable[[Query], Values | None]) -> Page:
    def page(query: Query) -> Answer:
        value = look(query)
        if value is None:
            return line(HTTPStatus.NOT_FOUND, "the broker does not know it, or not any more")
        return Answer(HTTPStatus.OK, "application/json", json.dumps(value).encode())

    return page


def status_page_html() -> str:
    """Return the status page, with its style and script inside: it loads nothing else."""

    def text(name: str) -> str:
        return (FOLDER / name).read_text(encoding="utf-8")

    script = "".join(text(f"{name}.js") for name in SCRIPTS)
    parts = {"style": text("page.css"), "script": f'"use strict";\n{script}'}
    document = text("page.html")
    for tag, content in parts.items():
        document = document.replace(f"<{tag}></{tag}>", f"<{tag}>\n{content}</{tag}>", 1)
    return document


def content_policy(page: str) -> str:
    """Return what a browser may do with a page: run what is written in it, and ask the broker."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    }
    own = [f"{tag}-src 'sha256-{digest}'" for tag, digest in hashes.items()]
    rest = ["connect-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"]
    return "; ".join(["default-src 'none'", *own, *rest])


def may_be_asked_as(header: str, named: Collection[str]) -> bool:
    """Return whether a Host header is an address, localhost, or in ``named``.

    The owner of any other name may have it lead to this machine, and a browser would then take the
    page for his own (DNS rebinding).

    >>> [may_be_asked_as(host, {"b.example"}) for host in ("B.example:80", "e.vil", "[::1]")]
    [True, False, True]
    """
    try:
        parts = urlsplit(f"//{header}")
        host = parts.hostname if parts.port is None or parts.port else None
    except ValueError:
        return False
    if host is None or parts.netloc != header or "@" in header:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost" or host in named
