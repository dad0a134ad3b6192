"""Count the memory of texts for byte limits."""

from __future__ import annotations

OBJECT_BYTES = 80
"""Overhead of a text object."""
WIDE_BYTES = 8
"""Bytes per character of a non-ASCII text: four, and four more for its cached UTF-8 encoding."""


def text_bytes(text: str) -> int:
    """Return an upper bound of the bytes that a text occupies.

    `sys.getsizeof` returns more for a text after it was encoded; the limit would then be given back
    more bytes than it had been charged.
    """
    return OBJECT_BYTES + len(text) * (1 if text.isascii() else WIDE_BYTES)
