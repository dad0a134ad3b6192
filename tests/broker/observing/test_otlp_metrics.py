"""Metrics over OTLP say what Prometheus is told."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from agent_harness.waiting import until
from broker.collector import Collector, collector
from broker.fakes import D_BLOCKS, broker, pair

STILL = ("restow_handoffs_ended", "restow_handoffs", "restow_engines", "restow_read_bytes")
"""Metrics that stay as they are after a handoff."""
PHASES = "restow_handoff_phase_seconds"


def page_of(address: str | None) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return str(answer.read().decode())


def labels(point: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((one.key, one.value.string_value) for one in point.attributes))


def numbers(kept: Collector, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    metric = kept.metrics[name]
    of = metric.sum if metric.HasField("sum") else metric.gauge
    return {labels(one): getattr(one, str(one.WhichOneof("value"))) for one in of.data_points}


async def test_what_a_collector_is_told_is_what_prometheus_is_told() -> None:
    async with (
        collector() as kept,
        broker(
            otlp_endpoint=kept.address, otlp_metrics_s=0.05, http_listen="127.0.0.1:0"
        ) as running,
        pair(running.address) as both,
    ):
        await both.published("waits")  # no D has asked
        await both.published("h")
        assert (await both.d.request("h", D_BLOCKS)).done
        done = (("reason", ""), ("state", "DONE"))
        await until(lambda: "restow_handoffs_ended" in kept.metrics)
        await until(lambda: numbers(kept, "restow_handoffs_ended")[done] == 1)
        text = await asyncio.to_thread(page_of, running.http_address)
        families = {one.name: one for one in text_string_to_metric_families(text)}
        for name in STILL:
            assert numbers(kept, name) == {
                tuple(sorted(one.labels.items())): one.value for one in families[name].samples
            }, name
        assert kept.metrics["restow_handoffs_ended"].sum.is_monotonic
        assert numbers(kept, "restow_handoffs")[("state", "READY"),] == 1
        own = {name for name in families if name.startswith("restow_")}
        assert own == {*kept.metrics}
        for point in kept.metrics[PHASES].histogram.data_points:
            of_it = [
                one
                for one in families[PHASES].samples
                if dict(labels(point)).items() <= one.labels.items()
            ]
            (count,) = [one.value for one in of_it if one.name.endswith("_count")]
            assert point.count == sum(point.bucket_counts) == count == 1
            buckets = [one for one in of_it if "le" in one.labels]
            assert [float(one.labels["le"]) for one in buckets[:-1]] == [*point.explicit_bounds]
            added = 0
            for bucket, own_count in zip(buckets, point.bucket_counts, strict=True):
                added += own_count
                assert bucket.value == added


async def test_no_metrics_are_sent_unless_asked_for() -> None:
    async with collector() as kept, broker(otlp_endpoint=kept.address):
        pass
    assert not kept.metrics


async def test_the_last_metrics_are_sent_at_the_end() -> None:
    async with collector() as kept:
        async with broker(otlp_endpoint=kept.address, otlp_metrics_s=600.0):
            assert not kept.metrics
        assert "restow_engines" in kept.metrics
