"""Trace each handoff that has ended with OpenTelemetry, from the handoff's own timeline.

A handoff is a span below the request of which an engine told (`trace_parent`), or else the root of
a trace. A publication for several readers is a span, and so is each of its deliveries. Inside are
spans of its phases and of each rank's read; every entry of the timeline is an event. Traces are
sent by a thread, and not on the broker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.statistics import Phase, phases_of
from restow.broker.reasons import ORDINARY
from restow.broker.server.base.hub import Hub
from restow.broker.versions import own_version

SEND_S: Final = 5
"""Timeout of the collector for a batch."""
FLUSH_S: Final = 2.0
"""How long the broker waits for the last traces when it ends."""
_W3C: Final = TraceContextTextMapPropagator()


def resource() -> Resource:
    """Return what the broker is to a collector."""
    return Resource.create({"service.name": "restow-broker", "service.version": own_version()})


class Tracer:
    """Make spans of ended handoffs. Belongs to the hub's event loop."""

    def __init__(self, exporter: SpanExporter, ratio: float, now_s: Callable[[], float]) -> None:
        """Export spans of the ``ratio`` of handoffs that are the root of a trace.

        A handoff below a request is sampled as that request is. ``now_s`` is the clock of
        timelines.
        """
        self._now_s = now_s
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=resource(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("restow.broker")

    def take(self, handoff: Handoff) -> None:
        """Trace a handoff that has ended."""
        epoch_ns = time.time_ns() - int(self._now_s() * 1e9)

        def wall_ns(at_s: float) -> int:
            return epoch_ns + int(at_s * 1e9)

        request = _W3C.extract({"traceparent": handoff.trace_parent})
        name = "publication" if handoff.shared else "delivery" if handoff.parent else "handoff"
        whole = self._tracer.start_span(name, request, start_time=wall_ns(handoff.born_s))
        if not whole.is_recording():
            return
        inside = set_span_in_context(whole)
        for phase, begin_s, end_s in phases_of(handoff):
            span = self._tracer.start_span(phase, inside, start_time=wall_ns(begin_s))
            if phase is Phase.TRANSFER:
                self._reads(handoff, set_span_in_context(span), wall_ns)
            span.end(wall_ns(end_s))
        for at_s, event, detail in handoff.timeline:
            about = {"restow.detail": str(detail)} if detail != "" else None
            whole.add_event(event, about, wall_ns(at_s))
        whole.set_attributes(_attributes(handoff))
        if handoff.failure is not None and handoff.failure.reason not in ORDINARY:
            whole.set_status(Status(StatusCode.ERROR, handoff.failure.detail))
        whole.end(wall_ns(handoff.ended_s))

    def _reads(self, handoff: Handoff, inside: Context, wall_ns: Callable[[float], int]) -> None:
        """Add a span for the read of each rank of D, as long as its agent reported."""
        for at_s, event, detail in handoff.timeline:
            match event, detail:
                case "settled", (int(rank), int(size_bytes), int(elapsed_us)):
                    begin_ns = wall_ns(max(at_s - elapsed_us / 1e6, handoff.granted_s))
                    about = {"restow.rank": rank, "restow.read_bytes": size_bytes}
                    span = self._tracer.start_span(
                        "read", inside, attributes=about, start_time=begin_ns
                    )
                    span.end(wall_ns(at_s))

    def close(self) -> None:
        """Send the last spans, within `FLUSH_S`. Blocks, so do not call it on the loop."""
        # The provider by itself would wait for half a minute.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(FLUSH_S)


def _attributes(handoff: Handoff) -> dict[str, AttributeValue]:
    """Return OpenTelemetry's own attributes where it has one (``gen_ai``, ``error``), and ours."""
    sides = {"source": handoff.source, "destination": handoff.destination}
    failure = handoff.failure
    model = next((one.layout.model.name for one in sides.values() if one is not None), "")
    return {
        "gen_ai.request.model": model,
        **({} if failure is None else {"error.type": failure.reason}),
        "restow.handoff.id": handoff.handoff_id,
        "restow.handoff.number": handoff.number,
        "restow.tenant": handoff.tenant,
        "restow.state": handoff.state,
        "restow.reason": "" if failure is None else failure.reason,
        "restow.read_bytes": handoff.bytes_read,
        **_readers(handoff),
        "restow.position_tokens": handoff.publication.position_tokens,
        **{
            f"restow.{side}.engine_id": engine.key.engine_id
            for side, engine in sides.items()
            if engine is not None
        },
    }


def _readers(handoff: Handoff) -> dict[str, AttributeValue]:
    if not handoff.shared:
        return {}
    return {
        "restow.readers": handoff.deliveries.readers,
        "restow.delivered": handoff.deliveries.done,
    }


@contextlib.asynccontextmanager
async def tracing(endpoint: str, ratio: float, hub: Hub) -> AsyncIterator[None]:
    """Send traces to a collector that speaks OTLP over gRPC, inside the ``async with``.

    ``endpoint`` is ``http://HOST:4317``, or https://. Without its collector, only traces are lost.
    """
    tracer = Tracer(OTLPSpanExporter(endpoint, timeout=SEND_S), ratio, hub.now_s)
    hub.watch_ends(tracer.take)
    try:
        yield
    finally:
        hub.watch_ends(None)
        await asyncio.to_thread(tracer.close)
