"""Show Prometheus metrics of a daemon's agents together. No label is what a peer said."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from restow.agents.link.settings import AgentFigures
from restow.broker.http.server import Answer, Pages, healthy_page, http_server, metrics_page
from restow.broker.versions import own_version


class FiguresCollector(Collector):
    """Show figures as they are when they are asked for."""

    def __init__(self, figures: Callable[[], AgentFigures]) -> None:
        """``figures`` is called on the loop of the agents."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        figures = self._figures()
        yield InfoMetricFamily("restow_agent", "The agent.", {"version": own_version()})
        yield _gauge("ranks", "Ranks of engines that are served.", figures.ranks)
        yield _gauge("ranks_connected", "Ranks that the broker knows.", figures.connected)
        yield from _staging(figures)
        yield _gauge("lanes", "Lanes that reads are on.", figures.lanes)
        yield CounterMetricFamily(
            "restow_agent_lanes_given_up",
            "Lanes that were given up because reads on them did not end.",
            figures.lanes_given_up,
        )
        yield from _reads(figures)


def _staging(figures: AgentFigures) -> Iterator[Metric]:
    pools = {"gather": figures.gather, "scatter": figures.scatter}
    for name, words, values in (
        ("staging_bytes", "Size of the staging pools.", [one.size_bytes for one in pools.values()]),
        ("staging_used_bytes", "Of these, in use.", [one.used_bytes for one in pools.values()]),
        (
            "staging_waiting",
            "Orders that wait for room in a pool.",
            [one.waiting for one in pools.values()],
        ),
    ):
        family = GaugeMetricFamily(f"restow_agent_{name}", words, labels=["pool"])
        for pool, value in zip(pools, values, strict=True):
            family.add_metric([pool], value)
        yield family


def _reads(figures: AgentFigures) -> Iterator[Metric]:
    reads = CounterMetricFamily(
        "restow_agent_reads", "Reads that ended well.", labels=["transport"]
    )
    read_bytes = CounterMetricFamily(
        "restow_agent_read_bytes", "Bytes of reads that ended well.", labels=["transport"]
    )
    errors = CounterMetricFamily(
        "restow_agent_read_errors",
        "Reads that failed, and connections for them.",
        labels=["transport"],
    )
    for kind, counts in figures.reads.items():
        reads.add_metric([kind], counts.reads)
        read_bytes.add_metric([kind], counts.read_bytes)
        errors.add_metric([kind], counts.errors)
    yield from (reads, read_bytes, errors)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"restow_agent_{name}", words, value)


@contextlib.asynccontextmanager
async def showing(
    listen: str, figures: Callable[[], AgentFigures], *others: Collector
) -> AsyncIterator[str]:
    """Show metrics inside the ``async with``, and yield the address; port 0 takes a free port.

    ``figures`` and ``others`` are asked on the caller's loop.

    Raises:
        ListenError: the address can't be listened on.
        AddressInvalidError: ``listen`` is no HOST:PORT.

    """
    registry = CollectorRegistry()
    for one in (FiguresCollector(figures), *others):
        registry.register(one)
    ProcessCollector(registry=registry)
    pages = Pages("agent", {"/metrics": metrics_page(registry), "/healthz": healthy_page}, {})

    async def answering(request: web.BaseRequest) -> Answer:
        return await pages.answer(request.method, request.path, request.query)

    async with http_server(listen, answering, {}) as address:
        yield address
