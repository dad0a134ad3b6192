"""What the command `restow store` runs."""

from __future__ import annotations

import queue
import signal

from restow.agents.store.options import StoreOptions
from restow.agents.store.store import Store
from restow.broker.client import Credentials
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger


def run_store(layout: Layout, options: StoreOptions, credentials: Credentials) -> None:
    """Keep states of the model of ``layout`` until SIGTERM or SIGINT.

    Says one line, ``store ready``, when the broker knows it. Raises what `Store` does, and why it
    was lost if it was.
    """
    ends: queue.SimpleQueue[RestowError | None] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.put(None))
    log = get_logger("restow.store").bind(engine=options.engine_id)
    with Store(layout, options, credentials, ends.put) as store:
        figures = store.figures
        log.info(
            "store ready",
            model=str(store.layout.model.identity),
            block_tokens=store.block_tokens,
            memory_bytes=figures.memory_bytes,
            disk_runs=figures.disk_runs,
        )
        lost = ends.get()
    log.info("store ended")
    if lost is not None:
        raise lost
