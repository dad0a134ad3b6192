"""What others say, shown: no character of it may steer a terminal, a browser or a line of a log.

Printable is what `str.isprintable` calls so: no control characters, no line ends, no marks that
turn the direction of text or take no room, no code that means nothing; spaces are.
"""

from __future__ import annotations

import re
from typing import Any

MAX_WORD_LENGTH = 64
MAX_ESCAPED = 4096
"""So much of a text that is not printable is shown: it may be megabytes long."""
_WORD = re.compile(rf"[A-Z][A-Z0-9_]{{0,{MAX_WORD_LENGTH - 1}}}")


def shown(text: str) -> str:
    r"""The text with escapes in place of what is not printable.

    >>> print(shown("p0\x1b[2J\nDONE \u202edesrever"))
    p0\x1b[2J\nDONE \u202edesrever
    """
    if text.isprintable():
        return text
    rest = "..." if len(text) > MAX_ESCAPED else ""
    text = text[:MAX_ESCAPED]
    return "".join(one if one.isprintable() else _escape(one) for one in text) + rest


def _escape(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode("ascii")


def shown_values(value: Any) -> Any:
    """A JSON value with all of its texts `shown`."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(key): shown_values(one) for key, one in value.items()}
    return [shown_values(one) for one in value] if isinstance(value, list) else value


def is_word(text: str) -> bool:
    """Whether it is a word for scripts, such as the reason of a failure.

    >>> is_word("READ_FAILED"), is_word("read failed"), is_word("")
    (True, False, False)
    """
    return _WORD.fullmatch(text) is not None
