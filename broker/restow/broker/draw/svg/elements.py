"""Elements of an SVG as escaped text, and the few numbers that text needs."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

TIMES = "\u00d7"
CHARACTER_WIDTH = 0.57
"""Of a character, in font sizes: wide enough for the fonts that browsers take."""


def tag(name: str, *children: str, **attributes: object) -> str:
    """One element; ``children`` are elements already. ``_`` in names of attributes is ``-``.

    >>> tag("rect", x=1.50, fill="a&b", class_="c")
    '<rect x="1.5" fill="a&amp;b" class="c"/>'
    """
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for key, value in attributes.items()
    )
    inner = "".join(children)
    return f"<{name}{said}>{inner}</{name}>" if inner else f"<{name}{said}/>"


def words(content: str) -> str:
    """Text inside of an element; what no XML may hold is replaced."""
    kept = (
        c if c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe" else "\ufffd"
        for c in content
    )
    return escape("".join(kept))


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A line of text."""
    return tag("text", words(content), x=x, y=y, **attributes)


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel and the same everywhere.

    >>> number(2.0), number(2.34), number(-0.01)
    ('2', '2.3', '0')
    """
    rounded = round(value, 1) + 0.0
    return f"{rounded:g}" if rounded != int(rounded) else str(int(rounded))


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """The corners of a polygon."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in pairs)


def fitted(content: str, width: float, font: float) -> str:
    """As much of a text as a width has room for."""
    most = max(int(width / (font * CHARACTER_WIDTH)), 1)
    return content if len(content) <= most else content[: most - 1] + "…"


def wrapped(content: str, width: float, font: float) -> list[str]:
    """A text as lines no longer than a width."""
    most = max(int(width / (font * CHARACTER_WIDTH)), 8)
    lines = [""]
    for word in content.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return [line if len(line) <= most else line[: most - 1] + "…" for line in lines]


def _value(value: object) -> str:
    return number(value) if isinstance(value, float | int) else str(value)
