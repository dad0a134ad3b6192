"""What a broker shows over HTTP: its pages, and its metrics by name and labels."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from restow.broker.server.serve import RunningBroker

Key = tuple[str, frozenset[tuple[str, str]]]


class Fetched(NamedTuple):
    """An answer of a page."""

    status: int
    headers: Message
    body: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.status == 200, self
        found: dict[str, Any] = json.loads(self.body)
        return found


async def fetch(running: RunningBroker, path: str, method: str = "GET") -> Fetched:
    def ask() -> Fetched:
        request = urllib.request.Request(f"http://{running.http_address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                return Fetched(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Fetched(error.code, error.headers, error.read().decode())

    return await asyncio.to_thread(ask)


async def metrics(running: RunningBroker) -> dict[Key, float]:
    status, _, body = await fetch(running, "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> Key:
    return f"restow_{name}", frozenset(labels.items())
