"""Show Prometheus metrics of a daemon's agents together. No label is text from a peer."""

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
from restow.broker.http.server import Answer, HttpPages, healthy_page, http_server, metrics_page
from restow.broker.versions import own_version


class FiguresCollector(Collector):
    """Collects the figures of agents when they are asked for."""

    def __init__(self, figures: Callable[[], AgentFigures]) -> None:
        """``figures`` is called on the loop of the agents."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        figures = self._figures()
        yield InfoMetricFamily("restow_agent", "The agent.", {"version": own_version()})
        for name, words, value in (
            ("ranks", "Ranks of engines that are served.", figures.ranks),
            ("ranks_connected", "Ranks that the broker knows.", figures.connected),
            ("lanes", "Lanes that reads are on.", figures.lanes),
        ):
            yield GaugeMetricFamily(f"restow_agent_{name}", words, value)
        yield CounterMetricFamily(
            "restow_agent_lanes_given_up",
            "Lanes that were given up because reads on them did not end.",
            figures.lanes_given_up,
        )
        pools = {"gather": figures.gather, "scatter": figures.scatter}
        for name, words, field in (
            ("staging_bytes", "Size of the staging pools.", "size_bytes"),
            ("staging_used_bytes", "Staging in use.", "used_bytes"),
            ("staging_waiting", "Orders that wait for room in a pool.", "waiting"),
        ):
            gauge = GaugeMetricFamily(f"restow_agent_{name}", words, labels=["pool"])
            for pool, pool_figures in pools.items():
                gauge.add_metric([pool], getattr(pool_figures, field))
            yield gauge
        for name, words, field in (
            ("reads", "Reads that succeeded.", "reads"),
            ("read_bytes", "Bytes of reads that succeeded.", "read_bytes"),
            ("read_errors", "Reads that failed, and connections for them.", "errors"),
        ):
            counter = CounterMetricFamily(f"restow_agent_{name}", words, labels=["transport"])
            for kind, counts in figures.reads.items():
                counter.add_metric([kind], getattr(counts, field))
            yield counter


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
    for collector in (FiguresCollector(figures), *others):
        registry.register(collector)
    ProcessCollector(registry=registry)
    pages = HttpPages("agent", {"/metrics": metrics_page(registry), "/healthz": healthy_page}, {})

    async def answering(request: web.BaseRequest) -> Answer:
        return await pages.answer(request.method, request.path, request.query)

    async with http_server(listen, answering, {}) as address:
        yield address
