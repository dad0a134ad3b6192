"""The tables of docs/peers.md, which are made from bench/results/peers.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, FILE = ROOT / "docs" / "peers.md", ROOT / "bench" / "results" / "peers.json"


def fresh(page: str, results: dict[str, Any]) -> str:
    """Return the page with everything that the command writes."""
    reasons: list[str] = []
    parts = {
        "table": _table(results, reasons),
        "versions": _versions(results),
        "sums": _sums(results),
    }
    parts["reasons"] = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    for name, lines in parts.items():
        page = _put(page, name, "\n".join(lines))
    return page


def _put(page: str, name: str, text: str) -> str:
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    page, count = place.subn(lambda match: f"{match[1]}{text}\n{match[2]}", page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for {name}, not one")
    return page


def _versions(results: dict[str, Any]) -> list[str]:
    versions = [
        f"{name} {version}" if version else f"{name} (could not be installed: see the table)"
        for name, version in results["versions"].items()
    ]
    return [f"Asked on {results['date']}: {'; '.join(versions)}."]


def _sums(results: dict[str, Any]) -> list[str]:
    """Make a line per peer: in how many geometries all bytes, wrong bytes or none arrive."""
    lines = [
        "| | all bytes right | wrong bytes | refuses or misses | not asked |",
        "|---" * 5 + "|",
    ]
    for name in results["rows"][0]["cells"]:
        ends = [_end(row["cells"][name]) for row in results["rows"]]
        counts = (str(ends.count(end)) for end in ("right", "wrong", "nothing", ""))
        lines.append(f"| {' | '.join([name, *counts])} |")
    return lines


def _end(cell: dict[str, Any]) -> str:
    if "how" in cell:
        return "nothing" if cell["how"] in ("refuses", "misses") else ""
    shares = [share for part in cell["shares"].values() for share in part]
    right = all(share["right_bytes"] == share["due_bytes"] for share in shares)
    return "right" if right and not cell["outside_bytes"] else "wrong"


def _table(results: dict[str, Any], reasons: list[str]) -> list[str]:
    """Make a line per geometry; reasons why a peer copies nothing are numbered in ``reasons``."""
    names = list(results["rows"][0]["cells"])
    lines = [f"| {' | '.join(['geometry', *names])} |", "|---" * (1 + len(names)) + "|"]
    for row in results["rows"]:
        cells = [_cell(name, row["cells"][name], reasons) for name in names]
        lines.append(f"| {' | '.join([row['geometry'], *cells])} |")
    return lines


def _cell(name: str, cell: dict[str, Any], reasons: list[str]) -> str:
    if "how" in cell:
        # Reasons that differ only in numbers are the same reason.
        reason = f"{name}: {_plain(cell['why'])}"
        alike = [
            re.sub(r"-?\b(0x)?[0-9a-f]*\d[0-9a-f]*\b", "#", text) for text in [*reasons, reason]
        ]
        if alike[-1] not in alike[:-1]:
            reasons.append(reason)
        return f"{cell['how']} ({1 + alike.index(alike[-1])})"
    parts = [
        f"{part} {_percent(shares)}"
        for part, shares in cell["shares"].items()
        if any(share["right_bytes"] < share["due_bytes"] for share in shares)
    ]
    if cell["outside_bytes"]:
        parts.append(f"{cell['outside_bytes']} bytes outside of D's pages")
    return ", ".join(parts) or "100 %"


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
    """Escape a peer's words, so that no part of them is markup or ends a cell."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(words.split()))
