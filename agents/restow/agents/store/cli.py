"""The command `restow store`, and the metrics that it shows."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from restow.agents.daemon.metrics import showing
from restow.agents.store.store import Store, StoreFigures, StoreOptions
from restow.broker.client import AdminClient, BrokerCallError, Credentials, SessionClosedError
from restow.broker.client.connection.loop_thread import LoopThread
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger

GAUGES = {
    "states": "States in memory.",
    "memory_bytes": "Memory for states.",
    "memory_used_bytes": "Memory in use.",
    "disk_runs": "Runs on the disk: states that brought new pieces.",
    "disk_used_bytes": "Disk in use.",
    "waiting": "States to request once fewer requests are open.",
    "pinned": "Pins of states.",
    "pinned_bytes": "Memory of pinned states; states that share blocks count them several times.",
}
COUNTERS = {
    "evictions": "Evictions from memory: states, or last blocks of states of attention alone.",
    "disk_lost": "States that were not written, and runs that could not be read.",
    "dropped": "States that were never requested, because too many waited.",
    "asked": "Requests for states that engines reported as worth keeping.",
    "kept": "Requests that brought their state.",
    "offered": "Requests of others for states of the store.",
    "given": "Requests of others that were served.",
    "declined": "Requests of others for states that were gone or unreadable.",
}
"""Descriptions of the fields of `StoreFigures`."""


class StoreCollector(Collector):
    """Collects a store's figures when they are asked for."""

    def __init__(self, figures: Callable[[], StoreFigures]) -> None:
        """``figures`` may be called on any thread."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        figures = self._figures()
        for name, words in GAUGES.items():
            yield GaugeMetricFamily(f"restow_store_{name}", words, getattr(figures, name))
        for name, words in COUNTERS.items():
            yield CounterMetricFamily(f"restow_store_{name}", words, getattr(figures, name))


@contextmanager
def showing_store(listen: str, store: Store) -> Iterator[str]:
    """Show metrics inside the ``with``, and yield the address; port 0 takes a free port.

    Raises `ListenError` and `AddressInvalidError`.
    """
    thread = LoopThread(
        "restow-store-metrics", lambda: SessionClosedError("metrics are no longer shown")
    )
    stack = AsyncExitStack()
    try:
        collector = StoreCollector(lambda: store.figures)
        shown = showing(listen, lambda: store.agent_figures, collector)
        yield thread.run(stack.enter_async_context(shown))
    finally:
        thread.run(stack.aclose())
        thread.close()


LOOK_EVERY_S = 1.0
"""Interval of checking for an engine, or for a signal that did not end the wait."""
Ends = queue.SimpleQueue[RestowError | None]


def run_store(
    source: Layout | str,
    options: StoreOptions,
    credentials: Credentials,
    http_listen: str | None = None,
) -> None:
    """Keep states of the model of ``source`` until SIGTERM or SIGINT.

    ``source`` is a layout, or the id of an engine to take the layout from; the store waits for
    that engine. Logs ``store ready`` when the broker knows the store. ``http_listen`` is the
    address for metrics; None serves none. Raises what `Store` raises, `ListenError`, and the reason
    for which the store was lost.
    """
    ends: Ends = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.put(None))
    log = get_logger("restow.store").bind(engine=options.engine_id)
    layout = _layout_of(source, options, credentials, ends) if isinstance(source, str) else source
    if layout is None:
        return
    with ExitStack() as stack:
        store = stack.enter_context(Store(layout, options, credentials, ends.put))
        shown = None
        if http_listen is not None:
            shown = stack.enter_context(showing_store(http_listen, store))
        figures = store.figures
        log.info(
            "store ready",
            model=str(store.layout.model.identity),
            block_tokens=store.block_tokens,
            memory_bytes=figures.memory_bytes,
            disk_runs=figures.disk_runs,
            http=shown,
        )
        lost = end_of(ends)
    log.info("store ended")
    if lost is not None:
        raise lost


def end_of(ends: Ends) -> RestowError | None:
    """Wait for the end, in the main thread; None if a signal asked for it."""
    while True:
        # A signal just before the wait, or on another thread, is handled after the wait.
        with contextlib.suppress(queue.Empty):
            return ends.get(timeout=LOOK_EVERY_S)


def _layout_of(
    engine_id: str, options: StoreOptions, credentials: Credentials, ends: Ends
) -> Layout | None:
    """Wait for an engine, and return its layout; None if the store must end before."""
    log = get_logger("restow.store").bind(engine=options.engine_id)
    is_logged = False
    with AdminClient(options.broker, credentials=credentials) as admin:
        while True:
            try:
                layout = admin.layout(engine_id)
            except BrokerCallError as error:
                if error.reason != "ENGINE_UNKNOWN":
                    raise
            else:
                log.info("layout taken", of=engine_id, model=str(layout.model.identity))
                return layout
            if not is_logged:
                log.info("waiting for an engine to register", waits_for=engine_id)
                is_logged = True
            try:
                ends.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            return None
