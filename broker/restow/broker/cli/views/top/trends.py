"""These functions draw what ended in the last quarter of an hour, in lines of small bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from restow.broker.draw.bytes_and_seconds import duration_text, rate_text

BARS = " ▁▂▃▄▅▆▇█"
KEPT_S = 900
LEAST_CELLS = 8


@dataclass(frozen=True, slots=True)
class Trend:
    """Holds one number of each step; None: nothing is known of that one."""

    name: str
    values: Sequence[float | None]
    words: Callable[[float], str]

    @property
    def summary(self) -> str:
        """What was at most, in words."""
        top = max((one for one in self.values if one is not None), default=0.0)
        return f"top {self.words(top)}" if top else "none"


def trends(traffic: dict[str, Any]) -> list[Trend]:
    """Return ends and bytes a second, how long half and 99 in 100 took, and failures."""
    steps, step_s = traffic["steps"], traffic["step_s"]
    ends = [(one["done"] + one["failed"] + one["cancelled"]) / step_s for one in steps]
    return [
        Trend("ended", ends, lambda rate: f"{rate:.1f}/s"),
        Trend("read", [one["bytes"] / step_s for one in steps], rate_text),
        Trend("p50", [one["p50_s"] for one in steps], duration_text),
        Trend("p99", [one["p99_s"] for one in steps], duration_text),
        Trend("failed", [float(one["failed"]) for one in steps], lambda count: f"{count:.0f}"),
    ]


def bars(values: Sequence[float | None], cells: int) -> str:
    """Return values as bars, several in one cell by the highest: what stands out stays.

    >>> bars([0, 1, 2, None, 8], 5), bars([1, 8, 2, 2], 2)
    (' ▁▂ █', '█▂')
    """
    known = [0.0 if one is None else one for one in values]
    top, count = max(known, default=0.0), len(known)
    cells = min(cells, count)
    found = []
    for at in range(cells):
        highest = max(known[at * count // cells : (at + 1) * count // cells])
        # What is not nothing has a bar, however low.
        found.append(BARS[max(1, round(highest / top * (len(BARS) - 1)))] if highest else BARS[0])
    return "".join(found)


def trend_lines(traffic: dict[str, Any], width: int) -> list[str]:
    """Return lines that fit: name, bars and the highest value, side by side where there is room."""
    if not traffic["steps"]:
        return []
    shown = trends(traffic)
    names, said = [one.name for one in shown], [one.summary for one in shown]
    name, words = max(map(len, names)), max(map(len, said))
    beside = min(len(shown), max(1, width // (name + words + LEAST_CELLS + 4)))
    cells = min(
        round(KEPT_S / traffic["step_s"]), max(LEAST_CELLS, width // beside - name - words - 4)
    )
    texts = [
        f"{one.name:{name}} {bars(one.values, cells):>{cells}} {one.summary:{words}}"
        for one in shown
    ]
    return ["  ".join(texts[at : at + beside]).rstrip() for at in range(0, len(texts), beside)]
