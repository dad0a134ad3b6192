"""Show handoffs in vLLM's own metrics: its periodic log line, and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from restow.agents.engines.common.handoff_ends import joined_counts, no_counts

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BYTES = tuple(float(2**power) for power in range(14, 38, 2))


@dataclass
class RestowStats(KVConnectorStats):  # type: ignore[misc]
    """The counts of `HandoffTally` and `AgentTally`, as vLLM wants them."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Begin with no counts."""
        self.data = no_counts()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return these counts joined with those of another side, or another interval."""
        return RestowStats(data=joined_counts(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of a line of the log."""
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
            "states sent": self.data["states_sent"],
        }
        for name, value in self.data["present"].items():
            reduced[name.replace("_", " ")] = value
        for kind, (_, _, errors) in self.data["reads"].items():
            if errors:
                reduced[f"{kind} errors"] = errors
        for reason, count in sorted(self.data["failures"].items()):
            reduced[reason] = count
        return reduced

    def is_empty(self) -> bool:
        """Return whether nothing has happened."""
        return not any(self.data.values())


class RestowPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics ``vllm:restow_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the metrics, a set for each engine."""
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
            "From D's demand to the grant: P's prefill and queue.",
            _SECONDS,
        )

        def counter(name: str, text: str, *labels: str) -> Any:
            names = [*labelnames, *labels]
            return self._counter_cls(name=name, documentation=text, labelnames=names)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return self._gauge_cls(
                name=name,
                documentation=text,
                labelnames=[*labelnames, *labels],
                multiprocess_mode="mostrecent",
            )

        self._tokens = counter(
            "vllm:restow_external_tokens", "Prompt tokens that another engine computed."
        )
        self._sent = counter("vllm:restow_states_sent", "States that another engine has read.")
        self._failures = counter(
            "vllm:restow_failures",
            "Handoffs that ended without a state in place, by side and reason.",
            "side",
            "reason",
        )
        self._hints = counter(
            "vllm:restow_kv_hints", "KV hints of requests, by kind and outcome.", "kind", "outcome"
        )
        self._present = {
            "held_blocks": gauge(
                "vllm:restow_held_blocks",
                "Blocks that are kept until another engine has read them.",
            ),
            "registered": gauge(
                "vllm:restow_registered", "1 while a session with the broker is open."
            ),
            "weights_known": gauge(
                "vllm:restow_weights_known",
                "1; 0 after weights were replaced, until states are handed over again.",
            ),
        }
        self._reads = [
            counter(f"vllm:restow_{name}", text, "transport")
            for name, text in (
                ("reads", "Reads of agents that succeeded."),
                ("read_bytes", "Bytes of reads that succeeded."),
                ("read_errors", "Reads of agents, and connections for them, that failed."),
            )
        ]
        self._lanes_given_up = counter(
            "vllm:restow_lanes_given_up", "Lanes of agents that were given up with their reads."
        )
        self._staging = gauge(
            "vllm:restow_staging_used_bytes", "Staging in use, of the rank with the most.", "pool"
        )
        for values in self._labels.values():
            for metric in (self._tokens, self._sent, self._lanes_given_up):
                metric.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record the counts of an interval."""
        for size_bytes, seconds in transfer_stats_data["transfers"]:
            self._bytes[engine_idx].observe(size_bytes)
            self._seconds[engine_idx].observe(seconds)
        for seconds in transfer_stats_data["waits"]:
            self._waits[engine_idx].observe(seconds)
        labels = self._labels[engine_idx]
        for name, count in transfer_stats_data["failures"].items():
            side, _, reason = name.partition(":")
            self._failures.labels(*labels, side, reason).inc(count)
        for name, count in transfer_stats_data["hints"].items():
            self._hints.labels(*labels, *name.split(":")).inc(count)
        for counter, name in (
            (self._tokens, "external_tokens"),
            (self._sent, "states_sent"),
            (self._lanes_given_up, "lanes_given_up"),
        ):
            counter.labels(*labels).inc(transfer_stats_data[name])
        for name, value in transfer_stats_data["present"].items():
            self._present[name].labels(*labels).set(value)
        for kind, counts in transfer_stats_data["reads"].items():
            for counter, count in zip(self._reads, counts, strict=True):
                counter.labels(*labels, kind).inc(count)
        for pool, size_bytes in transfer_stats_data["staging_used_bytes"].items():
            self._staging.labels(*labels, pool).set(size_bytes)
