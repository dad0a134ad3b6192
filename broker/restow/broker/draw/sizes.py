"""Bytes in words."""

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
