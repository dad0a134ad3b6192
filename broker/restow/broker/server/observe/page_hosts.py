"""Under which names a page may be asked for that tells names.

Whoever owns a name may have it lead to this machine, and a browser then takes the page for his own
(DNS rebinding): so a name counts only if the operator gave it. An address leads nowhere else.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def host_of(header: str) -> str:
    """The host of a Host header, without port and brackets; "": it names none.

    >>> host_of("localhost:9464"), host_of("[::1]:9464"), host_of("a@b"), host_of("x:y")
    ('localhost', '::1', '', '')
    """
    try:
        parts = urlsplit(f"//{header}")
        named = parts.hostname if parts.port is None or parts.port else None
    except ValueError:
        return ""
    return "" if named is None or parts.netloc != header or "@" in header else named


def may_be_asked_as(header: str, named: frozenset[str]) -> bool:
    """Whether a Host header names this machine: by an address, as localhost, or as ``named``.

    >>> [may_be_asked_as(one, frozenset({"status.example"})) for one in ("Status.example", "e.vil")]
    [True, False]
    """
    host = host_of(header)
    if host == "localhost" or host in named:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
