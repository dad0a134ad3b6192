"""What the broker's log says of its day: itself, engines, agents, and handoffs that fail."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version

from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import AgentKey, EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.server.bounded_log import BoundedLog
from restow.broker.server.settings import BrokerSettings


def settings_in_words(
    settings: BrokerSettings, address: str, http_address: str | None
) -> dict[str, object]:
    """What a broker begins with."""
    limits = asdict(settings.limits())
    known_by = "certificates" if settings.client_ca else "tokens" if settings.tokens else "nothing"
    return {
        "version": version("restow"),
        "pid": os.getpid(),
        "listening": address,
        "http": http_address,
        "tls": settings.tls_cert is not None,
        "callers_known_by": known_by,
        "strategy": settings.strategy.value,
        "digests": settings.digests.value,
        **{name: limits[name] for name in limits if name in type(settings).model_fields},
        "max_queue": settings.max_queue,
    }


def tell_registered(log: BoundedLog, engine: EngineRecord, identity: str) -> None:
    """An engine came."""
    model = engine.layout.model
    tell_engine(
        log,
        "engine registered",
        engine.key,
        incarnation=engine.incarnation,
        model=model.name,
        revision=engine.revision,
        ranks=engine.ranks,
        identity=identity,
    )


def tell_engine(log: BoundedLog, event: str, key: EngineKey, **values: object) -> None:
    """An engine came, spoke or went."""
    log.info(event, tenant=key.tenant, engine=key.engine_id, **values)


def tell_agent(log: BoundedLog, event: str, key: AgentKey, **values: object) -> None:
    """An agent came or went."""
    tell_engine(log, event, key.engine, rank=key.rank, **values)


def tell_failures(log: BoundedLog, failures: Iterable[tuple[Handoff, Failure]]) -> None:
    """Tell of handoffs that failed, and of demands that were refused. Ordinary ends are neither."""
    for handoff, failure in failures:
        sides = handoff.source, handoff.destination
        source, destination = (one.key.engine_id if one else None for one in sides)
        log.warning(
            "handoff failed",
            tenant=handoff.tenant,
            handoff=handoff.handoff_id,
            source=source,
            destination=destination,
            reason=failure.reason,
            detail=failure.detail,
        )
