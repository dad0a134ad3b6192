"""Make what people are shown of documents: titles, texts with units, and what to sort by.

The tables of the commands, ``restow top`` and the status page all take their columns, figures and
bars from here, so that a number has the same title and the same unit everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from restow.broker.display.documents import Values
from restow.broker.draw.bytes_and_seconds import duration_text, rate_text, size_text

NOTHING: Final = "-"
"""Shown for what is not known."""


class ShownColumn(NamedTuple):
    """Show a part of a document as a text, and sort by an amount, or else by that text."""

    text: Callable[[Values], str]
    amount: Callable[[Values], float | None] | None = None


def known(value: float | None, words: Callable[[float], str]) -> str:
    """Return a value in words, or a dash for None."""
    return NOTHING if value is None else words(value)


def progress_text(one: Values) -> str:
    """Return how much of a granted handoff is read, by the ranks that have ended their part."""
    if not one["reading_ranks"]:
        return NOTHING
    words = f"{size_text(one['bytes'])} of {size_text(one['expected_bytes'])}"
    if one["reading_ranks"] == 1:
        return words
    return f"{words}, {one['settled_ranks']} of {one['reading_ranks']} ranks"


def destination_text(one: Values) -> str:
    """Return D, or how many readers of a publication have the state."""
    readers = f"{one['delivered']} of {one['readers']} readers" if one["readers"] else NOTHING
    return str(one["destination_engine"] or readers)


def _reason_and_detail(one: Values) -> str:
    return f"{one['reason']}: {one['detail']}" if one["reason"] else ""


COLUMNS: Final[Mapping[str, ShownColumn]] = {
    "tenant": ShownColumn(lambda one: one["tenant"]),
    "broker": ShownColumn(lambda one: one["broker"] or NOTHING),
    "handoff": ShownColumn(lambda one: one["handoff_id"]),
    "state": ShownColumn(lambda one: one["state"]),
    "from": ShownColumn(lambda one: one["source_engine"] or NOTHING),
    "to": ShownColumn(destination_text),
    "tokens": ShownColumn(
        lambda one: str(one["position_tokens"] or NOTHING), lambda one: one["position_tokens"]
    ),
    "read": ShownColumn(lambda one: size_text(one["bytes"]), lambda one: one["bytes"]),
    "progress": ShownColumn(
        progress_text, lambda one: one["bytes"] if one["reading_ranks"] else None
    ),
    "age": ShownColumn(lambda one: duration_text(one["age_s"]), lambda one: one["age_s"]),
    "lease": ShownColumn(
        lambda one: known(one["lease_s"], lambda left_s: duration_text(max(0.0, left_s))),
        lambda one: one["lease_s"],
    ),
    "in": ShownColumn(
        lambda one: known(one["transfer_s"], duration_text), lambda one: one["transfer_s"]
    ),
    "ago": ShownColumn(
        lambda one: known(one["ended_ago_s"], duration_text), lambda one: one["ended_ago_s"]
    ),
    "by": ShownColumn(lambda one: ", ".join(one["strategies"]) or NOTHING),
    "waits for": ShownColumn(lambda one: one["waits_for"] or ""),
    "reason": ShownColumn(lambda one: one["reason"] or NOTHING),
    "detail": ShownColumn(lambda one: one["detail"] or one["waits_for"] or ""),
    "why": ShownColumn(_reason_and_detail),
}
"""Columns of handoffs, by title."""
UNDER_WAY: Final = (
    *("handoff", "state", "age", "lease", "from", "to", "tokens", "progress", "waits for"),
)
"""Of handoffs that have not ended. A narrow screen leaves the last two out."""
ENDED: Final = ("handoff", "state", "from", "to", "read", "in", "by", "ago", "why")


def row(one: Values, titles: Iterable[str]) -> list[str]:
    """Return the texts of a handoff in some columns."""
    return [COLUMNS[title].text(one) for title in titles]


def has_words(texts: Iterable[str], words: str) -> bool:
    """Return whether a row has all ``words``, in whichever column."""
    whole = " ".join(texts).lower()
    return all(word in whole for word in words.lower().split())


PAIRS: Final = ("from", "to", "reads at", "p50", "p99", "done", "failed", "read")
"""Columns of pairs of engines between which handoffs ended in the last quarter of an hour."""


def pair_row(pair: Values) -> tuple[str, ...]:
    """Return the texts of a pair in `PAIRS`; times last from the grant to the last report."""
    return (
        pair["source_engine"],
        pair["destination_engine"],
        known(pair["bytes_per_second"], rate_text),
        known(pair["p50_s"], duration_text),
        known(pair["p99_s"], duration_text),
        str(pair["done"]),
        str(pair["failed"] or NOTHING),
        size_text(pair["bytes"]),
    )


def name_tenants(rows: Iterable[Values], *names: str) -> None:
    """Put the tenant of each row before the names of its engines."""
    for one in rows:
        for name in names:
            one[name] = one[name] and f"{one['tenant']}/{one[name]}"


def held_text(groups: Iterable[Values]) -> str:
    """Return how much an engine says that it holds, in a few words; empty: nothing.

    >>> attention = {"count": 3, "block_tokens": 16, "window_tokens": None}
    >>> state = {"count": 2, "block_tokens": None, "window_tokens": None}
    >>> held_text([attention, state])
    '48 tokens, 2 snapshots'
    """
    whole = [group for group in groups if group["window_tokens"] is None]
    tokens = [group["count"] * group["block_tokens"] for group in whole if group["block_tokens"]]
    snapshots = [group["count"] for group in whole if not group["block_tokens"]]
    counted = ((tokens, "token"), (snapshots, "snapshot"))
    least = [(min(counts), what) for counts, what in counted if counts]
    return ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in least)


class Figure(NamedTuple):
    """Show a number of the whole broker, or of a tenant; ``bad`` draws the eye to it."""

    title: str
    text: str
    bad: bool = False


def figures(
    status: Values, engines: Sequence[Values], traffic: Values, lease_s: float | None
) -> list[Figure]:
    """Return the figures of a broker; ``lease_s`` is what the shortest lease has left."""
    ready = sum(one["session"] and one["agents"] == one["ranks"] for one in engines)
    # The last step is not over yet.
    last = traffic["steps"][-2] if len(traffic["steps"]) > 1 else None
    ends = last and (last["done"] + last["failed"] + last["cancelled"]) / traffic["step_s"]
    read_bytes = last and last["bytes"] / traffic["step_s"]
    return [
        Figure("engines ready", f"{ready} of {len(engines)}", ready < len(engines)),
        Figure("agents", str(sum(one["agents"] for one in engines))),
        Figure("under way", str(status["handoffs_live"])),
        Figure(
            "quarantine", str(status["handoffs_quarantined"]), status["handoffs_quarantined"] > 0
        ),
        Figure("shortest lease", known(lease_s, lambda left_s: duration_text(max(0.0, left_s)))),
        Figure("ended", known(ends, lambda rate: f"{rate:.1f}/s")),
        Figure("read", known(read_bytes, rate_text)),
        *(
            Figure(state, str(count), state in ("FAILED", "EXPIRED") and count > 0)
            for state, count in status["handoffs_ended"].items()
        ),
    ]


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Hold a number of each step of the last quarter of an hour; None: it is not known."""

    title: str
    values: Sequence[float | None]
    words: Callable[[float], str]

    @property
    def top(self) -> str:
        """The highest value, in words."""
        highest = max((one for one in self.values if one is not None), default=0.0)
        return f"top {self.words(highest)}" if highest else "none"


def series(traffic: Values, last_s: float | None = None) -> list[ChartSeries]:
    """Return rates of ends and of bytes, times from the grant to the end, and failures.

    ``last_s`` is how long the last step has lasted; None: take it for a whole one.
    """
    steps, step_s = traffic["steps"], traffic["step_s"]
    seconds = [step_s] * (len(steps) - 1) + [last_s or step_s]
    timed = list(zip(steps, seconds, strict=False))
    ends = [(one["done"] + one["failed"] + one["cancelled"]) / lasted for one, lasted in timed]
    return [
        ChartSeries("ended", ends, lambda rate: f"{rate:.1f}/s"),
        ChartSeries("read", [one["bytes"] / lasted for one, lasted in timed], rate_text),
        ChartSeries("p50", [one["p50_s"] for one in steps], duration_text),
        ChartSeries("p99", [one["p99_s"] for one in steps], duration_text),
        ChartSeries(
            "failed", [float(one["failed"]) for one in steps], lambda count: f"{count:.0f}"
        ),
    ]


class Bar(NamedTuple):
    """Draw a span of a handoff; ``begin`` and ``end`` are shares of its chart's time."""

    kind: str
    label: str
    begin: float
    end: float
    words: str
    over: bool


class Chart(NamedTuple):
    """Draw how the time of a handoff was spent."""

    title: str
    lasted_s: float
    bars: list[Bar]


def charts(handoff: Values) -> list[Chart]:
    """Return a chart of the whole handoff, then one of its ranks from the grant on.

    A read is short beside the prefill before it, so that ranks have a scale of their own.
    """
    phases = [one for one in handoff["spans"] if one["rank"] is None]
    ranks = [one for one in handoff["spans"] if one["rank"] is not None]
    granted_ms = max([0.0, *(one["end_ms"] for one in phases)])
    if ranks:
        end_ms, over = max(one["end_ms"] for one in ranks), all(one["over"] for one in ranks)
        read = {"kind": "read", "rank": None, "source_rank": None, "over": over}
        phases.append({**read, "begin_ms": granted_ms, "end_ms": end_ms, "bytes": handoff["bytes"]})
    both = (("the whole", phases, 0.0), ("from the grant on", ranks, granted_ms))
    return [_chart(title, spans, begin_ms) for title, spans, begin_ms in both if spans]


def _chart(title: str, spans: Sequence[Values], begin_ms: float) -> Chart:
    whole_ms = max(1e-6, *(one["end_ms"] - begin_ms for one in spans))
    bars = [
        Bar(
            one["kind"],
            _label(one),
            (one["begin_ms"] - begin_ms) / whole_ms,
            (one["end_ms"] - begin_ms) / whole_ms,
            _span_text(one),
            one["over"],
        )
        for one in spans
    ]
    return Chart(f"{title}, {duration_text(whole_ms / 1000)}", whole_ms / 1000, bars)


def _label(span: Values) -> str:
    if span["rank"] is None:
        return str(span["kind"])
    if span["source_rank"] is not None:
        return f"{span['kind']} P{span['source_rank']} for D{span['rank']}"
    return f"{span['kind']} rank {span['rank']}"


def _span_text(span: Values) -> str:
    lasted = duration_text((span["end_ms"] - span["begin_ms"]) / 1000)
    if span["bytes"] is not None:
        return f"{lasted}, {size_text(span['bytes'])}"
    if not span["over"]:
        return f"{lasted} so far"
    return f"{lasted}, not reported" if span["kind"] == "read" else lasted


class Line(NamedTuple):
    """Tell something of a handoff; ``style`` is "warn", "bad" or empty."""

    text: str
    style: str = ""


def about(handoff: Values) -> list[Line]:
    """Return what a handoff is of, how far it is, and what to do if it failed."""
    lines = [
        Line(
            f"from {handoff['source_engine'] or NOTHING} to {destination_text(handoff)}, "
            f"position {handoff['position_tokens'] or NOTHING}, {size_text(handoff['bytes'])} "
            f"read, first heard of {duration_text(handoff['age_s'])} ago"
        ),
        Line(f"content {handoff['content']}"),
    ]
    if handoff["prefix_tokens"]:
        declined = f", {handoff['offers_declined']} declined" if handoff["offers_declined"] else ""
        offered = f"offered to {handoff['offers']}{declined}"
        offered = offered if handoff["offers"] else "nobody holds it"
        lines.append(Line(f"asked for by prefix: {handoff['prefix_tokens']} tokens, {offered}"))
    if handoff["reading_ranks"]:
        lines.append(Line(f"reads {progress_text(handoff)}"))
    if handoff["waits_for"]:
        lines.append(Line(f"waits: {handoff['waits_for']}", "warn"))
    if handoff["reason"]:
        lines.append(Line(_reason_and_detail(handoff), "bad"))
        lines.append(Line(f"{handoff['meaning']}\nNext: {handoff['next_step']}"))
    return lines


def timeline(handoff: Values) -> list[tuple[str, str, str]]:
    """Return milliseconds, event and detail of everything that happened to a handoff."""
    return [
        (f"{one['at_ms']:.1f}", one["event"], one["detail"] or "") for one in handoff["timeline"]
    ]
