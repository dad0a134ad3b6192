"""The report as Markdown: verdicts, a table of shares with the versions, reasons, and limits."""

from __future__ import annotations

import re
from typing import Any

from restow.agents.conform.judge import VERDICTS


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report."""
    made = parts(report)
    unseen = [f"- {line}" for line in report["unseen"]]
    names = ("versions", "sums", "table", "reasons")
    return "\n\n".join("\n".join(lines) for lines in [*(made[n] for n in names), unseen] if lines)


def parts(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lines of each part: versions, sums, table, reasons."""
    reasons: list[str] = []
    rows = _rows(report, reasons)
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return {
        "versions": _versions(report),
        "sums": _sums(report),
        "table": rows,
        "reasons": numbered,
    }


def _versions(report: dict[str, Any]) -> list[str]:
    """Return a sentence with the version of each connector's package."""
    known = [
        f"{name} ({one['package']} {one['version']})" if one["version"] else f"{name} (not judged)"
        for name, one in report["connectors"].items()
    ]
    return [f"Asked on {report['date']}: {', '.join(known)}."]


def _sums(report: dict[str, Any]) -> list[str]:
    """Make a line per connector: how many geometries have which verdict."""
    lines = [f"| | {' | '.join(VERDICTS)} |", "|---" * (1 + len(VERDICTS)) + "|"]
    for name, counts in report["counts"].items():
        numbers = (str(counts.get(verdict, 0)) for verdict in VERDICTS)
        lines.append(f"| {' | '.join([name, *numbers])} |")
    return lines


def _rows(report: dict[str, Any], reasons: list[str]) -> list[str]:
    """Make a line per geometry; why a connector copies nothing is numbered in ``reasons``."""
    names = list(report["connectors"])
    lines = [f"| {' | '.join(['geometry', *names])} |", "|---" * (1 + len(names)) + "|"]
    for row in report["rows"]:
        cells = [_cell(name, row["cells"][name], reasons) for name in names]
        lines.append(f"| {' | '.join([row['geometry'], *cells])} |")
    return lines


def _cell(name: str, cell: dict[str, Any], reasons: list[str]) -> str:
    if "why" in cell:
        # Reasons that differ only in numbers are the same reason.
        reason = f"{name}: {_plain(cell['why'])}"
        alike = [
            re.sub(r"-?\b(0x)?[0-9a-f]*\d[0-9a-f]*\b", "#", text) for text in [*reasons, reason]
        ]
        if alike[-1] not in alike[:-1]:
            reasons.append(reason)
        return f"{cell['verdict']} ({1 + alike.index(alike[-1])})"
    shown = [
        f"{part} {_percent(shares)}"
        for part, shares in cell["shares"].items()
        if any(share["right_bytes"] < share["due_bytes"] for share in shares)
    ]
    if cell["outside_bytes"]:
        shown.append(f"{cell['outside_bytes']} bytes outside of D's pages")
    return ", ".join(shown) or "100 %"


def _percent(shares: list[dict[str, int]]) -> str:
    """Show a number per rank of D; only a whole share is 100, and only an empty share is 0."""
    return " / ".join(_number(share["right_bytes"], share["due_bytes"]) for share in shares) + " %"


def _number(right_bytes: int, due_bytes: int) -> str:
    """Show a percentage to a tenth.

    >>> _number(2, 3), _number(1, 9999), _number(9999, 10000), _number(4, 4)
    ('66.7', '<0.1', '>99.9', '100')
    """
    percent = 100 * right_bytes / due_bytes
    if 0 < percent < 0.1:
        return "<0.1"
    if 99.9 < percent < 100:
        return ">99.9"
    return f"{percent:.1f}".removesuffix(".0")


def _plain(words: str) -> str:
    """Escape a connector's words, so that no part of them is markup or ends a cell."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(words.split()))
