"""What became of demands by content, and what holdings cost that are true no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from restow.broker.core.common.keys import State
from restow.broker.server.base.hub import Hub
from simulation_harness.engines import Engine


def by_content(hubs: Iterable[Hub], engines: Iterable[Engine]) -> Counter[str]:
    """Count what became of demands by content, over all lives of a broker and of engines."""
    found = Counter[str]()
    for hub in hubs:
        directory = hub.directory
        found.update(
            demands=directory.offering.asked,
            made=directory.offering.offered,
            declined=directory.offering.declined,
        )
        for handoff in (*directory.ledger.ended.values(), *directory.ledger.by_number.values()):
            if handoff.offer is None:
                continue
            found["published"] += handoff.source is not None
            not_held = handoff.failure is not None and handoff.failure.reason == "NOT_HELD"
            found["never found"] += not_held and not handoff.offer.made
            found["NOT_HELD all the same"] += not_held and handoff.offer.made > 0
            given = handoff.state is State.DONE and handoff.offer.declined > 0
            found["given by the next"] += given
    found["not held"] = sum(engine.kept.false_offers for engine in engines)
    return found


def words_of(found: Counter[str], broken: int) -> str:
    """Return the counts as text for people."""
    return (
        f"by content: {found['demands']} demands, {found['never found']} of them for what nobody "
        f"said to hold; {found['made']} offers, {found['published']} published, "
        f"{found['declined']} declined or not answered. False residency: {found['not held']} "
        f"offers of what was held no more; where it was declined or not answered, "
        f"{found['given by the next']} demands were DONE by the next holder and "
        f"{found['NOT_HELD all the same']} ended NOT_HELD; wrong bytes or no end: {broken}"
    )
