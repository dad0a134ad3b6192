"""Handoffs appear in vLLM's own metrics: its periodic log line, and its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from restow.agents.engines.vllm.scheduler.tally import Tally

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BYTES = tuple(float(2**power) for power in range(14, 38, 2))


@dataclass
class RestowStats(KVConnectorStats):  # type: ignore[misc]
    """Holds what `Tally.take` gives, as vLLM wants it."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all."""
        self.data = Tally().take()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval's."""
        mine: dict[str, Any] = self.data
        theirs: dict[str, Any] = other.data
        return RestowStats(
            data={
                "transfers": [*mine["transfers"], *theirs["transfers"]],
                "failures": dict(Counter(mine["failures"]) + Counter(theirs["failures"])),
                "waits": [*mine["waits"], *theirs["waits"]],
                "external_tokens": mine["external_tokens"] + theirs["external_tokens"],
            }
        )

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of one line of the log."""
        transfers = self.data["transfers"]
        size_bytes = sum(size for size, _ in transfers)
        seconds = sum(seconds for _, seconds in transfers)
        waits = self.data["waits"]
        reduced: dict[str, int | float] = {
            "states received": len(transfers),
            "MiB": round(size_bytes / 2**20, 1),
            "mean transfer (ms)": round(1e3 * seconds / len(transfers), 2) if transfers else 0,
            "mean wait for P (ms)": round(1e3 * sum(waits) / len(waits), 2) if waits else 0,
            "external tokens": self.data["external_tokens"],
        }
        for reason, count in sorted(self.data["failures"].items()):
            reduced[reason] = count
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not (self.data["transfers"] or self.data["failures"])


class RestowPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Keeps the metrics ``vllm:restow_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the metrics, one set for each engine."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = self._histogram_cls(
                name=name, documentation=text, buckets=buckets, labelnames=labelnames
            )
            return {engine: made.labels(*values) for engine, values in self._labels.items()}

        self._bytes = histogram(
            "vllm:restow_received_bytes", "Bytes of a state that was received.", _BYTES
        )
        self._seconds = histogram(
            "vllm:restow_transfer_seconds", "From grant to the last rank's report.", _SECONDS
        )
        self._waits = histogram(
            "vllm:restow_wait_seconds",
            "From D's wish to the grant: P's prefill and queue.",
            _SECONDS,
        )
        tokens = self._counter_cls(
            name="vllm:restow_external_tokens",
            documentation="Prompt tokens that another engine computed.",
            labelnames=labelnames,
        )
        self._tokens = {engine: tokens.labels(*values) for engine, values in self._labels.items()}
        self._failures = self._counter_cls(
            name="vllm:restow_failures",
            documentation="Handoffs that ended without a state in place, by side and reason.",
            labelnames=[*labelnames, "side", "reason"],
        )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record an interval's."""
        for size_bytes, seconds in transfer_stats_data["transfers"]:
            self._bytes[engine_idx].observe(size_bytes)
            self._seconds[engine_idx].observe(seconds)
        for seconds in transfer_stats_data["waits"]:
            self._waits[engine_idx].observe(seconds)
        self._tokens[engine_idx].inc(transfer_stats_data["external_tokens"])
        for name, count in transfer_stats_data["failures"].items():
            side, _, reason = name.partition(":")
            self._failures.labels(*self._labels[engine_idx], side, reason).inc(count)
