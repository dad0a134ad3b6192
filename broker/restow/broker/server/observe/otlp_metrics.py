"""Send the broker's metrics over OTLP, for those who scrape no Prometheus.

They are those of `metrics`, under the same names (a counter without ``_total``), with labels as
attributes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from restow.broker.server.base.hub import Hub
from restow.broker.server.observe.metrics import DirectoryCollector
from restow.broker.server.observe.traces import FLUSH_S, SEND_S, resource

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


def otlp_metrics(families: Iterable[Family], begun_ns: int, now_ns: int) -> MetricsData:
    """Return Prometheus' ``families``, counted since ``begun_ns``, as a message of OTLP."""
    names = {"info": "_info"}  # the end of the only sample's name
    metrics = [
        Metric(
            one.name + names.get(one.type, ""),
            one.documentation,
            "",
            _data(one, begun_ns, now_ns),
        )
        for one in families
    ]
    scope = ScopeMetrics(InstrumentationScope("restow.broker"), metrics, "")
    return MetricsData([ResourceMetrics(resource(), [scope], "")])


def _data(family: Family, begun_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    if family.type == "histogram":
        return Histogram(_distributions(family.samples, begun_ns, now_ns), _CUMULATIVE)
    points = [
        NumberDataPoint(one.labels, begun_ns, now_ns, float(one.value))
        for one in family.samples
        if not one.name.endswith("_created")
    ]
    return Sum(points, _CUMULATIVE, True) if family.type == "counter" else Gauge(points)


def _distributions(
    samples: Iterable[Sample], begun_ns: int, now_ns: int
) -> list[HistogramDataPoint]:
    """Return a point for each set of labels; OTLP's buckets, unlike Prometheus', do not add up."""

    def labels(sample: Sample) -> dict[str, str]:
        return {name: value for name, value in sample.labels.items() if name != "le"}

    points = []
    for attributes, several in itertools.groupby(samples, labels):
        found = list(several)
        buckets = [(one.labels["le"], int(one.value)) for one in found if "le" in one.labels]
        counts = [count for _, count in buckets]
        own = [count - before for before, count in itertools.pairwise((0, *counts))]
        bounds = [float(bound) for bound, _ in buckets[:-1]]
        total = next(one.value for one in found if one.name.endswith("_sum"))
        unknown = None, None  # the least and the greatest value
        points.append(
            HistogramDataPoint(
                attributes,
                begun_ns,
                now_ns,
                counts[-1],
                total,
                own,
                bounds,
                *unknown,  # type: ignore[arg-type]
            )
        )
    return points


@contextlib.asynccontextmanager
async def sending_metrics(
    endpoint: str, every_s: float, hub: Hub, certificate_end_s: Callable[[], float | None]
) -> AsyncIterator[None]:
    """Send metrics to a collector every ``every_s`` inside the ``async with``, and at its end.

    If the collector is away, only these metrics are lost.
    """
    exporter = OTLPMetricExporter(endpoint, timeout=SEND_S)
    collector, begun_ns = DirectoryCollector(hub, certificate_end_s), time.time_ns()

    async def send() -> None:
        metrics = otlp_metrics(collector.collect(), begun_ns, time.time_ns())
        await asyncio.to_thread(exporter.export, metrics)

    async def run() -> None:
        while True:
            await asyncio.sleep(every_s)
            await send()

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await send()
        await asyncio.to_thread(exporter.shutdown, FLUSH_S * 1000)
