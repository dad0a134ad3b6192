"""The broker's log of events that peers cause, limited so that people can read it."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version

from restow.broker.core.common.actions import TellCommand
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import AgentKey, EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.logs import Allowance, get_logger
from restow.broker.server.base.settings import BrokerSettings

AT_ONCE, EACH_S = 20, 1.0
"""Lines of each event and tenant: at once, and seconds between further lines."""
MAX_KEPT = 1024
"""Most allowances kept; the allowance used least recently starts anew."""
LOOK_S = 10.0


class BoundedLog:
    """Limits the lines of each event and tenant; lines left out are counted and reported later.

    All methods belong to one event loop.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Begin without lines."""
        self._log = get_logger("restow.broker")
        self._now_s = now_s
        self._allowances: OrderedDict[tuple[str, str], Allowance] = OrderedDict()
        self._look_at_s = now_s() + LOOK_S

    def info(self, event: str, tenant: str = "", **values: object) -> None:
        """Log a normal event."""
        self._say(logging.INFO, event, tenant, values)

    def warning(self, event: str, tenant: str = "", **values: object) -> None:
        """Log an event that needs attention; no ``tenant`` means that the caller is not known."""
        self._say(logging.WARNING, event, tenant, values)

    def tick(self, now_s: float) -> None:
        """Report lines that were left out, if no later line has reported them."""
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for (event, tenant), allowance in self._allowances.items():
                self._tell(event, tenant, allowance)

    def _say(self, level: int, event: str, tenant: str, values: dict[str, object]) -> None:
        key = event, tenant
        allowance = self._allowances.get(key)
        if allowance is None:
            allowance = self._allowances[key] = Allowance(AT_ONCE, EACH_S)
            if len(self._allowances) > MAX_KEPT:
                (old_event, old_tenant), former = self._allowances.popitem(last=False)
                self._tell(old_event, old_tenant, former)
        self._allowances.move_to_end(key)
        left_out = allowance.take(self._now_s())
        if left_out is None:
            return
        if tenant:
            values["tenant"] = tenant
        if left_out:
            values["left_out"] = left_out
        self._log.log(level, event, **values)

    def _tell(self, event: str, tenant: str, allowance: Allowance) -> None:
        if count := allowance.forget():
            self._log.warning("lines left out", of=event, tenant=tenant, count=count)


def settings_in_words(
    settings: BrokerSettings, address: str, http_address: str | None
) -> dict[str, object]:
    """Return the settings that a broker logs at its start."""
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
    """Log that an engine registered."""
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
    """Log an event of an engine."""
    log.info(event, tenant=key.tenant, engine=key.engine_id, **values)


def tell_agent(log: BoundedLog, event: str, key: AgentKey, **values: object) -> None:
    """Log that an agent connected or left."""
    tell_engine(log, event, key.engine, rank=key.rank, **values)


def tell_command(log: BoundedLog, ended: TellCommand) -> None:
    """Log how a command ended."""
    command, answer = ended.command, ended.answer
    tell_engine(
        log,
        "command ended",
        command.engine,
        command=command.command_id,
        verb=command.verb.value,
        target=command.target and command.target.engine_id,
        position=command.prefix.position_tokens,
        outcome=answer.outcome.value,
        tokens=answer.tokens,
        reason=answer.reason,
        detail=answer.detail,
    )


def tell_failures(log: BoundedLog, failures: Iterable[tuple[Handoff, Failure]]) -> None:
    """Log handoffs that failed and demands that were refused, but no ordinary ends."""
    for handoff, failure in failures:
        sides = handoff.source, handoff.destination
        source, destination = (side.key.engine_id if side else None for side in sides)
        log.warning(
            "handoff failed",
            tenant=handoff.tenant,
            handoff=handoff.handoff_id,
            source=source,
            destination=destination,
            reason=failure.reason,
            detail=failure.detail,
        )
