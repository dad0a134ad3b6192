"""Which way calls to the broker go: direct, or through the proxy that ``RESTOW_PROXY`` names.

gRPC would take any proxy of the environment, for loopback too; those are set for the web, and most
of them let nothing else through.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from restow.broker.errors import AddressInvalidError

OWN = "RESTOW_PROXY"
OF_THE_WEB = ("grpc_proxy", "https_proxy", "http_proxy")
"""In gRPC's order."""
_SCHEME = "http://"


def proxy_options(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, int | str], ...]:
    """What a channel is opened with. Raises `AddressInvalidError`."""
    proxy = environment.get(OWN)
    if not proxy:
        return (("grpc.enable_http_proxy", 0),)
    if not proxy.startswith(_SCHEME):
        raise AddressInvalidError(f"{OWN} must be {_SCHEME}HOST:PORT, and begins otherwise")
    return (("grpc.http_proxy", proxy),)


def way_note(environment: Mapping[str, str] = os.environ) -> str:
    """What is to be said of the way; empty: it is direct, and nobody would think otherwise."""
    if environment.get(OWN):
        # What stands before an @ may be a password.
        return f"calls go through {OWN}, {environment[OWN].rpartition('@')[2]}"
    ignored = [name for name in OF_THE_WEB if environment.get(name)]
    if not ignored:
        return ""
    return f"calls go direct: {', '.join(ignored)} is not used, {OWN}={_SCHEME}HOST:PORT would be"
