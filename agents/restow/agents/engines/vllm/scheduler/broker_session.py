"""An engine begins its session with the broker here, and ends when it has lost that for good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import structlog

from restow.agents.engines.vllm.settings import ConnectorSettings
from restow.broker.client import BlockingSession, BrokerUnreachableError, Offer, Prefix
from restow.broker.errors import RestowError
from restow.broker.layout import Layout

PATIENCE_S = 5.0
"""How often an engine that waits for its broker says so."""


def registered(
    engine_id: str,
    incarnation: str,
    layout: Layout,
    kv_role: str,
    settings: ConnectorSettings,
    log: structlog.stdlib.BoundLogger,
    on_offer: Callable[[Offer], None] | None = None,
    on_drain: Callable[[], Sequence[Prefix]] | None = None,
) -> BlockingSession:
    """Return a session, as soon as the broker answers. It makes offers to ``on_offer``.

    What ``on_drain`` names is handed over when the engine is to leave.

    Raises `BrokerUnreachableError`, and `BrokerCallError` with the broker's reason.
    """

    def lost(error: RestowError) -> None:
        # It can hand nothing over any more, and whoever looks after the engine must see that.
        # vLLM's core ends by this as it always does (--shutdown-timeout), and its server with it.
        log.error("the broker is lost for good", reason=error.reason, detail=error.message)
        os.kill(os.getpid(), signal.SIGTERM)

    began_s = time.monotonic()
    while True:
        credentials = settings.credentials()
        session = BlockingSession(
            engine_id,
            incarnation,
            layout,
            settings.broker or None,
            credentials,
            lost,
            publishes=settings.tells or kv_role in ("kv_producer", "kv_both"),
            asks=settings.finds or kv_role in ("kv_consumer", "kv_both"),
            on_offer=on_offer,
            on_drain=on_drain,
        )
        left_s = began_s + settings.connect_timeout_s - time.monotonic()
        try:
            session.start(min(PATIENCE_S, max(left_s, 0.1)))
        except BrokerUnreachableError as error:
            if left_s <= PATIENCE_S:
                raise
            log.warning(
                "the broker is not there yet",
                detail=error.message,
                gives_up_in_s=round(left_s - PATIENCE_S),
            )
            continue
        log.info("registered with the broker", ranks=len(layout.ranks))
        return session
