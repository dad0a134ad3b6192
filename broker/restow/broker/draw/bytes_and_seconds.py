"""Write bytes, rates and durations for people. Sizes are in powers of 1024.

The status page has the same functions in `server/observe/page/units.js`; a test holds them equal.
Halves are rounded up, because Python and JavaScript can both do that. A value that rounds up to the
next unit is written in that unit.
"""

from __future__ import annotations

import math


def size_text(size_bytes: float) -> str:
    """Return a size in the largest unit that fits.

    >>> size_text(900), size_text(3 * 2**20), size_text(2**20 - 1)
    ('900 B', '3.0 MiB', '1.0 MiB')
    """
    if size_bytes < 1023.5:
        return f"{_rounded(size_bytes, 1):.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:
            return f"{_rounded(size_bytes, 10):.1f} {unit}"
    return f"{_rounded(size_bytes / 1024, 10):.1f} TiB"


def rate_text(bytes_per_second: float) -> str:
    """Return a rate in the largest unit that fits.

    >>> rate_text(6e9)
    '5.6 GiB/s'
    """
    return f"{size_text(bytes_per_second)}/s"


def duration_text(seconds: float) -> str:
    """Return a duration in one or two units.

    >>> duration_text(0.0042), duration_text(0.0421), duration_text(75), duration_text(7300)
    ('4.2 ms', '42 ms', '1 min 15 s', '2 h 1 min')
    >>> duration_text(0.0004), duration_text(0), duration_text(400_000)
    ('400 us', '0 us', '4 d 15 h')
    """
    if seconds < 0.0009995:
        return f"{_rounded(max(0.0, seconds) * 1e6, 1):.0f} us"
    if seconds < 0.00995:
        return f"{_rounded(seconds * 1000, 10):.1f} ms"
    if seconds < 0.9995:
        return f"{_rounded(seconds * 1000, 1):.0f} ms"
    if seconds < 59.95:
        return f"{_rounded(seconds, 10):.1f} s"
    whole = int(_rounded(seconds, 1))
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _rounded(value: float, parts: int) -> float:
    return math.floor(value * parts + 0.5) / parts
