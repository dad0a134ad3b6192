"""Prometheus metrics of a store, and of the agent in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from restow.agents.daemon.metrics import showing
from restow.agents.store.options import StoreFigures
from restow.agents.store.store import Store
from restow.broker.client import SessionClosedError
from restow.broker.client.connection.loop_thread import LoopThread

GAUGES = {
    "states": ("states", "States in memory."),
    "memory_bytes": ("memory_bytes", "Memory for states."),
    "used_bytes": ("memory_used_bytes", "Of this, in use."),
    "disk_runs": ("disk_runs", "States on the disk that brought anything."),
    "disk_used_bytes": ("disk_used_bytes", "What these take."),
    "waiting": ("waiting", "States to be asked for, when fewer are on their way."),
}
COUNTERS = {
    "evictions": ("evictions", "States that others took the place of, in memory."),
    "disk_lost": ("disk_lost", "States that were not written, and runs that could not be read."),
    "dropped": ("dropped", "States that waited in vain to be asked for."),
    "asked": ("asked", "States that were asked for, to be kept."),
    "kept": ("kept", "Those of them that came."),
    "offered": ("offered", "States that others asked for."),
    "given": ("given", "Those of them that D has."),
    "declined": ("declined", "Those of them that were not there, or could not be read."),
}
"""By figure: its name, and what it is."""


class StoreCollector(Collector):
    """Shows figures as they are when somebody asks."""

    def __init__(self, figures: Callable[[], StoreFigures]) -> None:
        """``figures`` may be called on any thread."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All families."""
        figures = self._figures()
        for figure, (name, words) in GAUGES.items():
            yield GaugeMetricFamily(f"restow_store_{name}", words, getattr(figures, figure))
        for figure, (name, words) in COUNTERS.items():
            yield CounterMetricFamily(f"restow_store_{name}", words, getattr(figures, figure))


@contextmanager
def showing_store(listen: str, store: Store) -> Iterator[str]:
    """Show metrics inside the ``with``, at ``HOST:PORT``; port 0 takes a free one.

    Gives the address. Raises `ListenError`, and `AddressInvalidError`.
    """
    thread = LoopThread(
        "restow-store-metrics", lambda: SessionClosedError("metrics are shown no more")
    )
    stack = AsyncExitStack()
    try:
        collector = StoreCollector(lambda: store.figures)
        shown = showing(listen, lambda: store.agent_figures, collector)
        yield thread.run(stack.enter_async_context(shown))
    finally:
        thread.run(stack.aclose())
        thread.close()
