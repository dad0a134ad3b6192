"""Show the directory as Prometheus metrics, read when they are asked for.

Labels are states, phases, quotas and known reasons, and never a text of a peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from restow.broker.core.common.keys import State
from restow.broker.core.ledger.statistics import BOUNDS_S, QUOTAS, Durations, Phase
from restow.broker.server.base.hub import Hub
from restow.broker.state_commands import Outcome, Verb
from restow.broker.versions import own_version

LIVE_STATES = (State.WAITING, State.READY, State.STAGING, State.READING)


class DirectoryCollector(Collector):
    """Collect metrics of a hub's directory. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub, certificate_end_s: Callable[[], float | None]) -> None:
        """Show a hub; ``certificate_end_s`` returns the end of the broker's certificate."""
        self._hub = hub
        self._certificate_end_s = certificate_end_s

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield InfoMetricFamily("restow_broker", "The broker.", {"version": own_version()})
        yield from self._members()
        yield from self._fleet()
        yield from self._handoffs()
        yield from self._prefixes()
        yield from self._refusals()
        yield from self._work()

    def _members(self) -> Iterator[Metric]:
        directory = self._hub.directory
        members, granting = directory.members, directory.granting
        engines = members.engines.values()
        yield _gauge("engines", "Registered engines.", len(engines))
        yield _gauge(
            "engines_ready",
            "Registered engines with a session and the agents of all ranks.",
            sum(engine.has_session and engine.complete for engine in engines),
        )
        yield _gauge("sessions", "Open sessions.", sum(engine.has_session for engine in engines))
        yield _gauge("agents", "Connected agents.", sum(len(engine.agents) for engine in engines))
        yield _gauge(
            "agents_away",
            "Agents whose stream broke, and that may come back.",
            sum(len(engine.away) for engine in engines),
        )
        yield _gauge(
            "plans", "Plans kept, a plan for each pair of layouts.", len(directory.plans.known)
        )
        yield _gauge(
            "draining",
            "1 while the broker waits for the reads under way before it ends.",
            granting.draining,
        )
        end = GaugeMetricFamily(
            "restow_certificate_end_seconds",
            "Unix time at which the broker's own certificate ends; no value without a certificate.",
        )
        if (end_s := self._certificate_end_s()) is not None:
            end.add_metric([], end_s)
        yield end

    def _fleet(self) -> Iterator[Metric]:
        """Yield the broker's standing among others; the only broker leads, and is sure."""
        report = self._hub.standing.report()
        age = GaugeMetricFamily(
            "restow_lease_age_seconds",
            "Time since the broker sent the last answered keepalive; absent without a lease.",
        )
        if report is not None and report.leadership.lease is not None:
            age.add_metric([], report.now_s - report.leadership.lease.sent_s)
        yield age
        brokers, expected, leads, led, sure, terms, warnings = 1, 0, True, True, True, 1, 0
        if report is not None:
            brokers, expected, terms = len(report.brokers), report.expected, report.terms
            leads, led = bool(report.leadership.epoch), bool(report.leadership.leader)
            sure = report.leadership.lease is not None and (
                report.leadership.still_s(report.now_s) is None
            )
            warnings = len(report.warnings)
        yield _gauge("brokers", "Brokers of the fleet, as far as this broker knows.", brokers)
        yield _gauge(
            "brokers_expected", "How many brokers there should be; 0: not known.", expected
        )
        yield _gauge("leads", "1 while this broker leads.", leads)
        yield _gauge("has_leader", "0 while no broker leads, as far as this broker knows.", led)
        yield _gauge(
            "lease_sure",
            "0 while the broker stands still because its lease may have ended, or while the "
            "registry does not let it in.",
            sure,
        )
        yield _gauge(
            "registry_warnings",
            "Problems that members of etcd report of themselves, such as NOSPACE.",
            warnings,
        )
        yield CounterMetricFamily("restow_terms", "How often the broker has begun to lead.", terms)

    def _handoffs(self) -> Iterator[Metric]:
        ledger = self._hub.directory.ledger
        live = GaugeMetricFamily(
            "restow_handoffs", "Handoffs that have not ended, by state.", labels=["state"]
        )
        states = Counter(handoff.state for handoff in ledger.by_number.values())
        for state in LIVE_STATES:
            live.add_metric([state], states[state])
        yield live
        yield _gauge(
            "handoffs_quarantined",
            "Ended handoffs whose pages at D may still be written to.",
            len(ledger.quarantine),
        )
        ends = CounterMetricFamily(
            "restow_handoffs_ended",
            "Handoffs that ended, by state and reason; the reason of DONE is empty.",
            labels=["state", "reason"],
        )
        yield _by_end(ends, ledger.statistics.ends)
        publications = CounterMetricFamily(
            "restow_publications_ended",
            "Publications for several readers that ended, by state and reason; their deliveries "
            "are handoffs that ended.",
            labels=["state", "reason"],
        )
        yield _by_end(publications, ledger.statistics.publications)
        phases = HistogramMetricFamily(
            "restow_handoff_phase_seconds",
            "How long phases of ended handoffs took: wait (until P's state was whole and D had "
            "asked), grant (until the read was ordered), transfer (until the last rank had "
            "reported), all (from its first message to its end).",
            labels=["phase"],
        )
        for phase in Phase:
            durations = ledger.statistics.phases[phase]
            phases.add_metric([phase], _buckets(durations), durations.total_s)
        yield phases
        yield CounterMetricFamily(
            "restow_read_bytes",
            "Bytes that D's agents reported as read.",
            ledger.statistics.bytes_read,
        )
        yield CounterMetricFamily(
            "restow_read_early_bytes",
            "Bytes that were read while P still computed.",
            ledger.statistics.early_bytes,
        )
        yield CounterMetricFamily(
            "restow_digests_compared",
            "Ended handoffs whose content was compared with P's digests.",
            ledger.checks.checked,
        )
        yield CounterMetricFamily(
            "restow_digest_mismatches",
            "Handoffs that failed because digests differed.",
            ledger.checks.mismatches,
        )

    def _prefixes(self) -> Iterator[Metric]:
        prefixes, offering = self._hub.directory.prefixes, self._hub.directory.offering
        holders = prefixes.holders.values()
        told = sum(len(holder.tellers) for holder in holders)
        yield _gauge("holding_engines", "Engines that report which prefixes they hold.", told)
        hashes = sum(len(holder.index) for holder in holders)
        yield _gauge("held_hashes", "Different hashes that any engine holds.", hashes)
        yield _gauge("holdings_bytes", "Memory of held hashes, about.", prefixes.size_bytes)
        for name, words, count in (
            ("holdings_forgotten", "Holdings evicted for lack of room.", prefixes.forgotten),
            (
                "holdings_told_again",
                "Requests to an engine to report all holdings again.",
                prefixes.told_again,
            ),
            ("prefixes_asked", "Chains that were looked up.", prefixes.asked),
            ("prefixes_found", "Chains of which an engine held a state.", prefixes.found),
            ("prefix_demands", "Demands by prefix, not published.", offering.asked),
            (
                "prefix_demands_not_held",
                "Demands by prefix that no engine held.",
                offering.not_held,
            ),
            ("offers", "Offers of demands by prefix to holders.", offering.offered),
            ("offers_declined", "Offers declined, or not answered in time.", offering.declined),
        ):
            yield CounterMetricFamily(f"restow_{name}", words, count)

    def _refusals(self) -> Iterator[Metric]:
        statistics = self._hub.directory.ledger.statistics
        # A count that begins at 0 has a rate from its first increment on.
        yield _counts(
            "refused",
            "Messages of engines and agents that were refused, by reason: the handoff goes on "
            "without them, or had ended.",
            "reason",
            {"HANDOFF_CONFLICT": 0, **statistics.refused},
        )
        yield _counts(
            "calls_refused",
            "Calls that were refused, and streams that an error ended, by reason.",
            "reason",
            {"UNAUTHENTICATED": 0, "FORBIDDEN": 0, **statistics.refused_calls},
        )
        commands = CounterMetricFamily(
            "restow_commands",
            "Commands about states that have ended, by what they wanted and how they ended.",
            labels=["verb", "outcome"],
        )
        counts = self._hub.directory.commands.counts
        for verb, outcome in product(Verb, Outcome):
            if outcome is not Outcome.ACCEPTED:
                commands.add_metric([verb.value, outcome.value], counts[verb, outcome])
        yield commands
        yield _counts(
            "quota_refusals",
            "Messages and calls that were refused for a tenant's quota, by the quota.",
            "quota",
            {**dict.fromkeys(QUOTAS, 0), **statistics.over_quota},
        )

    def _work(self) -> Iterator[Metric]:
        hub = self._hub
        queued = GaugeMetricFamily(
            "restow_queued_messages",
            "Messages that wait for streams to take them.",
            labels=["stream"],
        )
        queued.add_metric(["engine"], sum(outbox.waiting for outbox in hub.engines.values()))
        queued.add_metric(["agent"], sum(outbox.waiting for outbox in hub.agents.values()))
        yield queued
        for name, words, durations in (
            ("loop_lag", "How late the event loop came to the clock's ticks.", hub.loop_lag),
            ("planning", "How long plans took, with their time in the queue.", hub.planning),
            (
                "measuring",
                "How long agents measured between two hosts, failed measurements too.",
                hub.directory.probing.measuring,
            ),
        ):
            family = HistogramMetricFamily(f"restow_{name}_seconds", words)
            family.add_metric([], _buckets(durations), durations.total_s)
            yield family


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"restow_{name}", words, value)


def _by_end(family: CounterMetricFamily, counts: Mapping[tuple[State, str], int]) -> Metric:
    # DONE begins at 0, so that it has a rate from its first increment on.
    for (state, reason), count in sorted({(State.DONE, ""): 0, **counts}.items()):
        family.add_metric([state, reason], count)
    return family


def _counts(name: str, words: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"restow_{name}", words, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus has them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*BOUNDS_S, float("inf")), durations.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
    return buckets


def registry_of(hub: Hub, certificate_end_s: Callable[[], float | None]) -> CollectorRegistry:
    """Return the metrics of a hub and of the broker's process."""
    registry = CollectorRegistry()
    registry.register(DirectoryCollector(hub, certificate_end_s))
    ProcessCollector(registry=registry)
    return registry
