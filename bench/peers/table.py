"""The table of docs/peers.md, made of docs/peers.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FILE = DOCS / "peers.md", DOCS / "peers.json"


def fresh(page: str, found: dict[str, Any]) -> str:
    """The page with all that the command writes, anew."""
    reasons: list[str] = []
    parts = {"table": _table(found, reasons), "versions": _versions(found), "sums": _sums(found)}
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


def _versions(found: dict[str, Any]) -> list[str]:
    versions = [
        f"{name} {version}" if version else f"{name} (could not be had: see the table)"
        for name, version in found["versions"].items()
    ]
    return [f"Asked on {found['date']}: {'; '.join(versions)}."]


def _sums(found: dict[str, Any]) -> list[str]:
    """A line a peer: of how many geometries it brings all, wrong bytes, or nothing."""
    lines = [
        "| | all bytes right | wrong bytes | refuses or misses | not asked |",
        "|---" * 5 + "|",
    ]
    for name in found["rows"][0]["cells"]:
        ends = [_end(row["cells"][name]) for row in found["rows"]]
        counts = (str(ends.count(end)) for end in ("right", "wrong", "nothing", ""))
        lines.append(f"| {' | '.join([name, *counts])} |")
    return lines


def _end(cell: dict[str, Any]) -> str:
    if "how" in cell:
        return "nothing" if cell["how"] in ("refuses", "misses") else ""
    shares = [share for part in cell["shares"].values() for share in part]
    right = all(share["right_bytes"] == share["due_bytes"] for share in shares)
    return "right" if right and not cell["outside_bytes"] else "wrong"


def _table(found: dict[str, Any], reasons: list[str]) -> list[str]:
    """A line a geometry; why a peer copies nothing goes to ``reasons``, and its number here."""
    names = list(found["rows"][0]["cells"])
    lines = [f"| {' | '.join(['geometry', *names])} |", "|---" * (1 + len(names)) + "|"]
    for row in found["rows"]:
        cells = [_cell(name, row["cells"][name], reasons) for name in names]
        lines.append(f"| {' | '.join([row['geometry'], *cells])} |")
    return lines


def _cell(name: str, cell: dict[str, Any], reasons: list[str]) -> str:
    if "how" in cell:
        # One reason for all geometries, whose numbers differ.
        reason = f"{name}: {_plain(cell['why'])}"
        alike = [re.sub(r"-?\b(0x)?[0-9a-f]*\d[0-9a-f]*\b", "#", one) for one in [*reasons, reason]]
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
    """One number a rank of D: only what is whole is 100, only nothing is 0."""
    return " / ".join(_number(one["right_bytes"], one["due_bytes"]) for one in shares) + " %"


def _number(right_bytes: int, due_bytes: int) -> str:
    """Of a hundred, to a tenth.

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
    """A peer's words as text of a page: nothing in them is markup, or ends a cell."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(words.split()))
