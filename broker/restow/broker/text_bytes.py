"""What a text counts where bytes are counted."""

from __future__ import annotations

OBJECT_BYTES = 80
"""Of a text beside its characters."""
WIDE_BYTES = 8
"""Of a character of a text that is not all ASCII: four, and as many again once it was encoded."""


def text_bytes(text: str) -> int:
    """How many bytes a text takes at most.

    `sys.getsizeof` would say more of the same text once it was encoded, so that what is given back
    were more than what was kept.
    """
    return OBJECT_BYTES + len(text) * (1 if text.isascii() else WIDE_BYTES)
