"""Turn documents into what people are shown: titles, texts with units, and sort amounts.

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
    """Show a part of a document as a text, and sort by its amount, or else by the text."""

    text: Callable[[Values], str]
    amount: Callable[[Values], float | None] | None = None


def known(value: float | None, words: Callable[[float], str]) -> str:
    """Return a value in words, or a dash for None."""
    return NOTHING if value is None else words(value)


def progress_text(handoff: Values) -> str:
    """Return how much of a granted handoff is read, and how many ranks have ended their part."""
    if not handoff["reading_ranks"]:
        return NOTHING
    words = f"{size_text(handoff['bytes'])} of {size_text(handoff['expected_bytes'])}"
    if handoff["reading_ranks"] == 1:
        return words
    return f"{words}, {handoff['settled_ranks']} of {handoff['reading_ranks']} ranks"


def destination_text(handoff: Values) -> str:
    """Return D, or how many readers of a publication have the state."""
    readers = (
        f"{handoff['delivered']} of {handoff['readers']} readers" if handoff["readers"] else NOTHING
    )
    return str(handoff["destination_engine"] or readers)


def _reason_and_detail(handoff: Values) -> str:
    return f"{handoff['reason']}: {handoff['detail']}" if handoff["reason"] else ""


def _amount(name: str, words: Callable[[float], str]) -> ShownColumn:
    return ShownColumn(lambda handoff: known(handoff[name], words), lambda handoff: handoff[name])


COLUMNS: Final[Mapping[str, ShownColumn]] = {
    "tenant": ShownColumn(lambda handoff: handoff["tenant"]),
    "handoff": ShownColumn(lambda handoff: handoff["handoff_id"]),
    "state": ShownColumn(lambda handoff: handoff["state"]),
    "from": ShownColumn(lambda handoff: handoff["source_engine"] or NOTHING),
    "to": ShownColumn(destination_text),
    "tokens": _amount("position_tokens", str),
    "read": _amount("bytes", size_text),
    "progress": ShownColumn(
        progress_text, lambda handoff: handoff["bytes"] if handoff["reading_ranks"] else None
    ),
    "age": _amount("age_s", duration_text),
    "lease": _amount("lease_s", lambda left_s: duration_text(max(0.0, left_s))),
    "in": _amount("transfer_s", duration_text),
    "ago": _amount("ended_ago_s", duration_text),
    "by": ShownColumn(lambda handoff: ", ".join(handoff["strategies"]) or NOTHING),
    "waits for": ShownColumn(lambda handoff: handoff["waits_for"] or ""),
    "reason": ShownColumn(lambda handoff: handoff["reason"] or NOTHING),
    "detail": ShownColumn(lambda handoff: handoff["detail"] or handoff["waits_for"] or ""),
    "why": ShownColumn(_reason_and_detail),
}
"""Columns of handoffs, by title."""
UNDER_WAY: Final = (
    *("handoff", "state", "age", "lease", "from", "to", "tokens", "progress", "waits for"),
)
"""Columns of handoffs that have not ended. A narrow screen leaves the last two out."""
ENDED: Final = ("handoff", "state", "from", "to", "read", "in", "by", "ago", "why")


def row(handoff: Values, titles: Iterable[str]) -> list[str]:
    """Return the texts of a handoff in some columns."""
    return [COLUMNS[title].text(handoff) for title in titles]


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
    for entry in rows:
        for name in names:
            entry[name] = entry[name] and f"{entry['tenant']}/{entry[name]}"


def held_text(groups: Iterable[Values]) -> str:
    """Return how much an engine says that it holds, in a few words; empty if it holds nothing.

    >>> attention = {"count": 3, "block_tokens": 16, "window_tokens": None}
    >>> state = {"count": 2, "block_tokens": None, "window_tokens": None}
    >>> held_text([attention, state])
    '48 tokens, 2 snapshots'
    """
    whole = [group for group in groups if group["window_tokens"] is None]
    tokens = [group["count"] * group["block_tokens"] for group in whole if group["block_tokens"]]
    snapshots = [group["count"] for group in whole if not group["block_tokens"]]
    counted = ((tokens, "token"), (snapshots, "snapshot"))
    least = [(min(counts), unit) for counts, unit in counted if counts]
    return ", ".join(f"{count} {unit}{'s' * (count != 1)}" for count, unit in least)


class Figure(NamedTuple):
    """Show a number of the whole broker, or of a tenant; ``bad`` draws the eye to it."""

    title: str
    text: str
    bad: bool = False


def figures(
    status: Values, engines: Sequence[Values], traffic: Values, lease_s: float | None
) -> list[Figure]:
    """Return the figures of a broker; ``lease_s`` is what the shortest lease has left."""
    ready = sum(engine["session"] and engine["agents"] == engine["ranks"] for engine in engines)
    # The last step is not over yet.
    last = traffic["steps"][-2] if len(traffic["steps"]) > 1 else None
    ends = last and (last["done"] + last["failed"] + last["cancelled"]) / traffic["step_s"]
    read_bytes = last and last["bytes"] / traffic["step_s"]
    return [
        Figure("engines ready", f"{ready} of {len(engines)}", ready < len(engines)),
        Figure("agents", str(sum(engine["agents"] for engine in engines))),
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
    """Hold a number of each step of the last quarter of an hour; None if it is not known."""

    title: str
    values: Sequence[float | None]
    words: Callable[[float], str]

    @property
    def top(self) -> str:
        """The highest value, in words."""
        highest = max((value for value in self.values if value is not None), default=0.0)
        return f"top {self.words(highest)}" if highest else "none"


def series(traffic: Values, last_s: float | None = None) -> list[ChartSeries]:
    """Return rates of ends and of bytes, times from the grant to the end, and failures.

    ``last_s`` is how long the last step has lasted; None means a whole step.
    """
    steps, step_s = traffic["steps"], traffic["step_s"]
    seconds = [step_s] * (len(steps) - 1) + [last_s or step_s]
    timed = list(zip(steps, seconds, strict=False))
    ends = [(step["done"] + step["failed"] + step["cancelled"]) / lasted for step, lasted in timed]
    return [
        ChartSeries("ended", ends, lambda rate: f"{rate:.1f}/s"),
        ChartSeries("read", [step["bytes"] / lasted for step, lasted in timed], rate_text),
        ChartSeries("p50", [step["p50_s"] for step in steps], duration_text),
        ChartSeries("p99", [step["p99_s"] for step in steps], duration_text),
        ChartSeries(
            "failed", [float(step["failed"]) for step in steps], lambda count: f"{count:.0f}"
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
    """Return a chart of the whole handoff, then a chart of its ranks from the grant on.

    A read is short beside the prefill before it, so the ranks have a scale of their own.
    """
    phases = [span for span in handoff["spans"] if span["rank"] is None]
    ranks = [span for span in handoff["spans"] if span["rank"] is not None]
    granted_ms = max([0.0, *(span["end_ms"] for span in phases)])
    if ranks:
        end_ms, over = max(span["end_ms"] for span in ranks), all(span["over"] for span in ranks)
        read = {"kind": "read", "rank": None, "source_rank": None, "over": over}
        phases.append({**read, "begin_ms": granted_ms, "end_ms": end_ms, "bytes": handoff["bytes"]})
    both = (("the whole", phases, 0.0), ("from the grant on", ranks, granted_ms))
    return [_chart(title, spans, begin_ms) for title, spans, begin_ms in both if spans]


def _chart(title: str, spans: Sequence[Values], begin_ms: float) -> Chart:
    whole_ms = max(1e-6, *(span["end_ms"] - begin_ms for span in spans))
    bars = [
        Bar(
            span["kind"],
            _label(span),
            (span["begin_ms"] - begin_ms) / whole_ms,
            (span["end_ms"] - begin_ms) / whole_ms,
            _span_text(span),
            span["over"],
        )
        for span in spans
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
    """Tell something about a handoff; ``style`` is "warn", "bad" or empty."""

    text: str
    style: str = ""


def about(handoff: Values) -> list[Line]:
    """Return what a handoff moves, how far it is, and what to do if it failed."""
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
        (f"{event['at_ms']:.1f}", event["event"], event["detail"] or "")
        for event in handoff["timeline"]
    ]
