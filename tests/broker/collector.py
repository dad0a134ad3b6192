"""A collector of OpenTelemetry traces and metrics, over OTLP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps all it is sent."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []
        self.metrics: dict[str, Metric] = {}
        """The latest of each name."""
        self.services: set[str] = set()
        self.answers = asyncio.Event()
        self.answers.set()

    async def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> object:
        await self.answers.wait()
        for resource in request.resource_spans:
            known = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(known.get("service.name", ""))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the metrics for a collector."""

    def __init__(self, kept: Collector) -> None:
        self._kept = kept

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> object:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self._kept.metrics |= {one.name: one for one in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    server, kept = grpc.aio.server(), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
        MetricsCollector(kept), server
    )
    kept.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield kept
    finally:
        await server.stop(None)


def attributes(span: Span) -> dict[str, str | int]:
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }
