"""Pages that are made on another loop than the one that serves them, once for all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from restow.broker.http.server import Answer, Request

ANSWER_S = 5.0
"""For so long the loop may be busy before a request is told so."""
TEXT = "text/plain; charset=utf-8"

Query = Mapping[str, str]
Page = Callable[[Query], Answer]
NO_FIELDS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


class Pages:
    """Answers requests with pages, each of which a function makes on the loop that is shown."""

    def __init__(
        self,
        who: str,
        pages: Mapping[str, Page],
        fields: Mapping[str, Collection[str]] = NO_FIELDS,
    ) -> None:
        """``who`` is shown, in words; ``pages`` and the ``fields`` of queries they use are by path.

        To be called on the loop shown.
        """
        self._who = who
        self._pages, self._fields = dict(pages), dict(fields)
        self._loop = asyncio.get_running_loop()
        self._made: dict[tuple[str, tuple[tuple[str, str], ...]], Future[Answer]] = {}
        """Pages that are asked for and not yet made."""

    async def answer(self, request: Request) -> Answer:
        """What somebody gets who asks. On the HTTP server's loop."""
        page = self._pages.get(request.path)
        if page is None:
            return said(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if request.method not in ("GET", "HEAD"):
            return said(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        # Others of a query make no other page: whoever varies them must not have it made again.
        used = self._fields.get(request.path, ())
        query = {name: value for name, value in request.query.items() if name in used}
        key = (request.path, tuple(sorted(query.items())))
        made = self._made.get(key)
        if made is None:
            try:
                made = asyncio.run_coroutine_threadsafe(_made(page, query), self._loop)
            except RuntimeError:
                return said(HTTPStatus.SERVICE_UNAVAILABLE, f"the {self._who} has ended")
            self._made[key] = made
            made.add_done_callback(lambda _: self._made.pop(key, None))
        done, _ = await asyncio.wait({asyncio.wrap_future(made)}, timeout=ANSWER_S)
        if not done or made.cancelled():
            return said(HTTPStatus.SERVICE_UNAVAILABLE, f"the {self._who} does not answer")
        return made.result()


def metrics_page(registry: CollectorRegistry) -> Page:
    """A page that shows what is registered, for Prometheus."""
    return lambda _: Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))


def healthy_page(_: Query) -> Answer:
    """What is answered while the loop runs that is shown."""
    return said(HTTPStatus.OK, "ok")


def said(status: HTTPStatus, words: str) -> Answer:
    """An answer of one line."""
    return Answer(status, TEXT, f"{words}\n".encode())


async def _made(page: Page, query: Query) -> Answer:
    return page(query)
