"""These functions draw a handoff's spans as a Gantt chart in lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from restow.broker.draw.bytes_and_seconds import duration_text, size_text

COLORS = {"wait": "bright_black", "grant": "yellow", "stage": "magenta", "read": "blue"}
LABEL = 18
"""Columns of what stands before a bar."""
LEAST_BAR = 10
Values = dict[str, Any]


def gantt_lines(value: Values, width: int) -> list[Text]:
    """Return the chart of a handoff's ``--json`` form: the whole, then ranks by their own scale.

    A read is short beside the prefill before it, so what ranks do begins at the grant.
    """
    phases = [one for one in value["spans"] if one["rank"] is None]
    ranks = [one for one in value["spans"] if one["rank"] is not None]
    if ranks:
        begin_ms = max([0.0, *(one["end_ms"] for one in phases)])
        end_ms = max(one["end_ms"] for one in ranks)
        over = all(one["over"] for one in ranks)
        read = {"rank": None, "source_rank": None, "bytes": value["bytes"], "over": over}
        phases.append({"kind": "read", "begin_ms": begin_ms, "end_ms": end_ms, **read})
    lines = _chart("the whole", phases, width) if phases else []
    return [*lines, *_chart("from the grant on", ranks, width, begin_ms)] if ranks else lines


def _chart(title: str, spans: Sequence[Values], width: int, begin_ms: float = 0.0) -> list[Text]:
    whole_ms = max(1e-6, *(one["end_ms"] - begin_ms for one in spans))
    words = [_words(one) for one in spans]
    cells = max(LEAST_BAR, width - LABEL - max(map(len, words)) - 2)
    lines = [Text(f"{title}, {duration_text(whole_ms / 1000)}", style="bold")]
    for one, said in zip(spans, words, strict=True):
        first = min(cells - 1, max(0, int((one["begin_ms"] - begin_ms) / whole_ms * cells)))
        last = max(first + 1, round((one["end_ms"] - begin_ms) / whole_ms * cells))
        sign = "\N{FULL BLOCK}" if one["over"] else "\N{MEDIUM SHADE}"
        line = Text(f"{_label(one):{LABEL}}")
        line.append(" " * first)
        line.append(sign * (last - first), style=COLORS.get(one["kind"], ""))
        line.append(" " * (cells - last) + f"  {said}")
        lines.append(line)
    return lines


def _label(span: Values) -> str:
    if span["rank"] is None:
        return str(span["kind"])
    if span["source_rank"] is not None:
        return f"{span['kind']} P{span['source_rank']} for D{span['rank']}"
    return f"{span['kind']} rank {span['rank']}"


def _words(span: Values) -> str:
    lasted = duration_text((span["end_ms"] - span["begin_ms"]) / 1000)
    if span["bytes"] is not None:
        return f"{lasted}, {size_text(span['bytes'])}"
    if not span["over"]:
        return f"{lasted} so far"
    return f"{lasted}, not reported" if span["kind"] == "read" else lasted
