"""Bytes and seconds in words."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """Bytes as people read them.

    >>> size_text(900), size_text(3 * 2**20)
    ('900 B', '3.0 MiB')
    """
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} TiB"


def rate_text(bytes_per_second: float) -> str:
    """Bytes a second as people read them.

    >>> rate_text(6e9)
    '5.6 GiB/s'
    """
    return f"{size_text(bytes_per_second)}/s"


def duration_text(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration_text(0.0421), duration_text(75), duration_text(7300)
    ('42 ms', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
