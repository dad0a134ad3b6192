"""One handoff as the status page shows it: its spans, its timeline, and what to do if it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.progress import spans_of
from restow.broker.core.handoffs.timeline import in_words
from restow.broker.printable import shown_values
from restow.broker.reasons import advice_for
from restow.broker.server.base.hub import Hub
from restow.broker.server.observe.overview import Values, ended, under_way


def one_handoff(hub: Hub, query: Mapping[str, str]) -> Values | None:
    """What is known of the handoff ``id`` of ``tenant``, bounded by its timeline; None: nothing."""
    ledger, tenant = hub.directory.ledger, query.get("tenant", "default")
    handoff = ledger.known(tenant, query.get("id", ""))
    if handoff is None:
        return None
    now_s, failure = hub.now_s(), handoff.failure
    advice = advice_for(failure.reason) if failure else None
    listed = ended(handoff, now_s) if handoff.ended else _live(hub, handoff, now_s)
    found: Values = shown_values(
        {
            **listed,
            "lasted_s": (handoff.ended_s if handoff.ended else now_s) - handoff.born_s,
            "meaning": advice.meaning if advice else "",
            "next_step": advice.next_step if advice else "",
            "spans": [
                {
                    **asdict(span),
                    "kind": span.kind.value,
                    "begin_s": span.begin_s - handoff.born_s,
                    "end_s": span.end_s - handoff.born_s,
                }
                for span in spans_of(handoff, now_s)
            ],
            "timeline": [
                {"at_s": at_s - handoff.born_s, "event": event, "detail": in_words(event, detail)}
                for at_s, event, detail in handoff.timeline
            ],
        }
    )
    return found


def _live(hub: Hub, handoff: Handoff, now_s: float) -> Values:
    failure = handoff.failure
    return {
        **under_way(hub.directory.granting, handoff, now_s),
        "reason": failure.reason if failure else "",
        "detail": failure.detail if failure else "",
    }
