"""W3C trace contexts (https://www.w3.org/TR/trace-context/, version 00) in what engines say."""

from __future__ import annotations

import re
from typing import Final

_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def known_trace(trace_parent: str) -> str:
    """The context, or nothing: who follows the standard goes on without one that it can't read."""
    return trace_parent if trace_parent and _PARENT.fullmatch(trace_parent) else ""
