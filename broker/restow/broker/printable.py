"""Escape foreign text, so that no character of it can control a terminal, a browser or a log.

Text is printable in the sense of `str.isprintable`: it has no control characters, line ends,
direction marks, zero-width characters or unassigned code points. Spaces are printable.
"""

from __future__ import annotations

import re
from typing import Any

MAX_WORD_LENGTH = 64
MAX_ESCAPED = 4096
"""Longest part of an unprintable text that is shown; the text may have megabytes."""
_WORD = re.compile(rf"[A-Z][A-Z0-9_]{{0,{MAX_WORD_LENGTH - 1}}}")


def shown(text: str) -> str:
    r"""Return the text with escapes for unprintable characters.

    >>> print(shown("p0\x1b[2J\nDONE \u202edesrever"))
    p0\x1b[2J\nDONE \u202edesrever
    """
    if text.isprintable():
        return text
    rest = "..." if len(text) > MAX_ESCAPED else ""
    text = text[:MAX_ESCAPED]
    return (
        "".join(character if character.isprintable() else _escape(character) for character in text)
        + rest
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def shown_values(value: Any) -> Any:
    """Return a JSON value in which every text is escaped by `shown`."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(key): shown_values(item) for key, item in value.items()}
    return [shown_values(item) for item in value] if isinstance(value, list) else value


def is_word(text: str) -> bool:
    """Return whether ``text`` is a word for scripts, such as the reason of a failure.

    >>> is_word("READ_FAILED"), is_word("read failed"), is_word("")
    (True, False, False)
    """
    return _WORD.fullmatch(text) is not None
