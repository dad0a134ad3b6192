"""Start and stop the broker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from restow.broker.errors import ExtraMissingError, ListenError, RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import MAX_FROM_BROKER_BYTES, MAX_TO_BROKER_BYTES, SERVER_PINGS
from restow.broker.rpc.status import ErrorInterceptor, ParsingInterceptor
from restow.broker.server import process
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.logging import BoundedLog, settings_in_words
from restow.broker.server.base.one_of_several import OneOfSeveral, in_fleet
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.gate.guard import GuardInterceptor, RawContext, WatchingInterceptor
from restow.broker.server.gate.strangers import Strangers
from restow.broker.server.gate.trust import Trust, trust_of
from restow.broker.server.services.admin_service import AdminService
from restow.broker.server.services.agent_service import AgentLinkService
from restow.broker.server.services.broker_service import BrokerService
from restow.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    agent_link_pb2,
    agent_link_pb2_grpc,
    broker_pb2,
    broker_pb2_grpc,
)

SERVICES = (
    broker_pb2.DESCRIPTOR.services_by_name["Broker"].full_name,
    agent_link_pb2.DESCRIPTOR.services_by_name["AgentLink"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_TO_BROKER_BYTES),
    ("grpc.max_send_message_length", MAX_FROM_BROKER_BYTES),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    *SERVER_PINGS,
    ("grpc.so_reuseport", 0),
)

OPEN_CONNECTIONS = 1 << 20
"""Without TLS: as many connections as open files allow."""
CALLS_FOR_CONNECTION = 8
"""Open calls of a tenant for each connection that the broker allows."""
TLS_CONNECTIONS = 512
"""With TLS: a stranger may make the broker keep 80 KiB for each connection."""
MAX_METADATA_BYTES = 8 << 10
"""Bytes of a call's metadata before its caller is identified."""

STOP_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that serves."""

    hub: Hub
    address: str
    clock: asyncio.Task[None]
    """The task that runs the clock. It ends only by a failure; nothing would expire without it."""
    checks: health.aio.HealthServicer
    http_address: str | None = None
    """Address of metrics and probes."""
    fleet: OneOfSeveral | None = None
    """None: it is the only broker."""

    async def failed(self) -> None:
        """Wait until the broker cannot go on serving, and raise the error.

        Either its clock has failed, or its work as one of several brokers: it would go on without
        a lease. That work ends without an error when the broker leaves the fleet.
        """
        works = [self.clock]
        if self.fleet is not None and self.fleet.running is not None:
            works.append(self.fleet.running)
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
        for work in done:
            work.result()

    async def drain(self) -> None:
        """Stop serving: let another broker lead, or as the only broker wait for open reads."""
        await self.checks.enter_graceful_shutdown()
        if self.fleet is None:
            await self.hub.drain()
        else:
            await self.fleet.leave()


def strangers_options(connections: int) -> tuple[tuple[str, int], ...]:
    """Return gRPC's limits for callers that are not identified yet; for brokers with TLS."""
    return (
        # Messages that the broker waits for may be larger. Bandwidth probing would raise this to
        # hundreds of megabytes.
        ("grpc.http2.lookahead_bytes", 16 << 10),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", 100),
        # Calls that gRPC has taken and the broker has not, some kilobytes each. Clients retry.
        ("grpc.server.max_pending_requests", max(64, connections // 8)),
        ("grpc.server.max_pending_requests_hard_limit", max(128, connections // 4)),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    )


def add_services(hub: Hub, server: grpc.aio.Server) -> None:
    """Add every service of the contract."""
    broker_pb2_grpc.add_BrokerServicer_to_server(BrokerService(hub), server)
    agent_link_pb2_grpc.add_AgentLinkServicer_to_server(AgentLinkService(hub), server)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(hub), server)


def interceptors_of(
    trust: Trust | None,
    log: BoundedLog,
    admitted: Callable[[RawContext], None],
    tenant_max_calls: int = 0,
    refused: Callable[[RestowError], None] = lambda _: None,
) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors before every handler, the outermost first.

    ``admitted`` is told each call that is let in, ``refused`` the error of each call that is
    refused or fails. ``tenant_max_calls`` holds only where callers are identified.
    """
    identify = None if trust is None else trust.identify
    watching = WatchingInterceptor(identify, log, refused, admitted)
    guards = [] if identify is None else [GuardInterceptor(identify, admitted, tenant_max_calls)]
    return [ErrorInterceptor(), watching, *guards, ParsingInterceptor()]


@contextlib.asynccontextmanager
async def running_broker(settings: BrokerSettings) -> AsyncIterator[RunningBroker]:
    """Serve inside the ``async with``. With port 0, `RunningBroker.address` has the chosen port.

    Raises `ListenError`, and a `TrustError` for settings and files that cannot identify callers.
    """
    log = get_logger("restow.broker")
    trust = trust_of(settings)
    hub = Hub(
        settings.limits(),
        settings.strategy,
        settings.max_queue,
        allow_narrowing=settings.allow_narrowing,
        costs=settings.cost_model(),
        digests=settings.content_digests(),
    )
    connections = process.room_for(
        settings.max_connections or (TLS_CONNECTIONS if trust else OPEN_CONNECTIONS)
    )
    by_path = settings.listen.startswith("unix:")  # a Unix socket has no strangers
    # Without TLS a whole fleet may be strangers for a moment.
    strangers = Strangers(connections, connections // 4 if trust else connections * 3 // 4)
    server = grpc.aio.server(
        interceptors=interceptors_of(
            trust,
            hub.said,
            (lambda _: None) if by_path else strangers.admitted,
            CALLS_FOR_CONNECTION * connections,
            hub.directory.ledger.statistics.refuse_call,
        ),
        options=(
            *SERVER_OPTIONS,
            *(strangers_options(connections) if trust else ()),
            ("grpc.max_allowed_incoming_connections", connections),
        ),
    )
    add_services(hub, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        if trust is None:
            port = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, trust.credentials)
    except RuntimeError as error:
        raise ListenError(
            f"can't listen on {settings.listen}: is it in use, or not an address of this machine? "
            f"({error})",
            listen=settings.listen,
        ) from None
    host = settings.listen.rpartition(":")[0]
    address = settings.listen if by_path else f"{host}:{port}"
    clock: asyncio.Task[None] | None = None
    try:
        async with contextlib.AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(in_fleet(settings, address, hub))
            await server.start()
            for service in ("", *SERVICES):
                await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
            clock = asyncio.create_task(hub.run_clock())
            if not by_path:
                stack.enter_context(strangers.kept_few(port))
            shown = None
            certificate_end_s = trust.certificate_end_s if trust is not None else lambda: None
            if settings.http_listen is not None:
                # Imported here, so that a broker without a page starts sooner.
                from restow.broker.server.observe.web import serving

                shown = await stack.enter_async_context(
                    serving(
                        settings.http_listen,
                        hub,
                        settings.status_page,
                        [name.strip() for name in settings.http_hosts.split(",") if name.strip()],
                        certificate_end_s,
                    )
                )
            if settings.otlp_endpoint is not None:
                sendings = _to_collector(settings, settings.otlp_endpoint, hub, certificate_end_s)
                for sending in sendings:
                    await stack.enter_async_context(sending)
            if settings.kv_events is not None:
                await stack.enter_async_context(_publishing(settings, settings.kv_events, hub))
            log.info("broker started", **settings_in_words(settings, address, shown))
            yield RunningBroker(hub, address, clock, checks, shown, fleet)
    finally:
        log.info("broker ends", uptime_s=round(hub.now_s() - hub.started_s, 1))
        await checks.enter_graceful_shutdown()
        hub.close()
        await server.stop(STOP_GRACE_S)
        if clock is not None:
            clock.cancel()


def _publishing(
    settings: BrokerSettings, endpoint: str, hub: Hub
) -> contextlib.AbstractAsyncContextManager[None]:
    try:
        from restow.broker.server.observe.kv_events import publishing
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"KV events need ZeroMQ and msgpack, and {error.name} is not installed here: "
            f"pip install 'restow[events]', or leave --kv-events out",
            module=error.name or "",
        ) from None
    return publishing(hub, settings.kv_events_tenant, endpoint, settings.kv_events_replay or "")


def _to_collector(
    settings: BrokerSettings,
    endpoint: str,
    hub: Hub,
    certificate_end_s: Callable[[], float | None],
) -> Iterator[contextlib.AbstractAsyncContextManager[None]]:
    """Yield what sends traces, and metrics if they are asked for, while it is entered."""
    try:
        from restow.broker.server.observe.otlp_metrics import sending_metrics
        from restow.broker.server.observe.traces import tracing
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"traces need OpenTelemetry, and {error.name} is not installed here: "
            f"pip install 'restow[trace]', or leave --otlp-endpoint out",
            module=error.name or "",
        ) from None
    yield tracing(endpoint, settings.trace_ratio, hub)
    if settings.otlp_metrics_s:
        yield sending_metrics(endpoint, settings.otlp_metrics_s, hub, certificate_end_s)


async def serve_until_signalled(
    settings: BrokerSettings, ready: asyncio.Event | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; print a line when ready.

    Open reads have ``settings.drain_s`` to end; a second signal does not wait for them. Raises the
    error of a broker that cannot go on.
    """
    signals: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    process.set_up()
    # Handoffs make no cycles; a full collection over the history would stall the loop.
    gc.set_threshold(200_000, 20, 100)
    async with running_broker(settings) as broker:
        print(f"restow broker listening on {broker.address}", flush=True)
        if broker.http_address is not None:
            print(f"restow broker shows http://{broker.http_address}/metrics", flush=True)
        if ready is not None:
            ready.set()
        await _first_of(broker.failed(), signals.get())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_s):
                await _first_of(broker.failed(), signals.get(), broker.drain())


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Wait for the first to end, and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
