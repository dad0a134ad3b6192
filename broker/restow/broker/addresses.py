"""Parse and check addresses: ``HOST:PORT``, ``[IPv6]:PORT``, ``unix:PATH``."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import partial

from restow.broker.errors import AddressInvalidError

DEFAULT_PORT = 7350
HTTP_PORT = 9464
"""Default port for metrics, the same as for OpenTelemetry's Prometheus exporter."""
MAX_PORT = 65535
_SCHEME = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):")
"""Schemes that gRPC parses itself."""
_OWN_LIST = re.compile(r"ipv[46]:")
"""Schemes with which gRPC accepts a list of several addresses."""


def checked_target(address: str) -> str:
    """Return ``address`` unchanged if a client can connect to it.

    Raises `AddressInvalidError`.

    >>> checked_target("broker.example:7350"), checked_target("unix:/run/broker.sock")
    ('broker.example:7350', 'unix:/run/broker.sock')
    """
    if not _SCHEME.match(address) and host_and_port(address)[1] == 0:
        raise _invalid(address, DEFAULT_PORT, f"port 0 is for listening; ports are 1 to {MAX_PORT}")
    return address


def checked_targets(addresses: str) -> tuple[str, ...]:
    """Return the addresses of a comma-separated list, in the order in which a client tries them.

    Raises `AddressInvalidError`.

    >>> checked_targets("a.example:7350, b.example:7350")
    ('a.example:7350', 'b.example:7350')
    >>> checked_targets("ipv4:10.0.0.1:7,10.0.0.2:7")
    ('ipv4:10.0.0.1:7,10.0.0.2:7',)
    """
    if _OWN_LIST.match(addresses):
        return (checked_target(addresses),)
    return tuple(checked_target(part.strip()) for part in addresses.split(","))


def checked_listener(address: str) -> str:
    """Return ``address`` unchanged if a server can listen on it; port 0 takes any free port.

    Raises `AddressInvalidError`.
    """
    if not re.fullmatch(r"unix:.+", address):
        host_and_port(address)
    return address


def checked_http(address: str) -> str:
    """Return ``address`` unchanged if an HTTP server can listen on it; ``unix:PATH`` is refused.

    Raises `AddressInvalidError`.
    """
    host_and_port(address, HTTP_PORT)
    return address


def host_and_port(address: str, usual_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split an address into host and port; an IPv6 host loses its brackets.

    Raises `AddressInvalidError`, whose message shows the correct form. ``usual_port`` stands in
    that form if ``address`` has no port.

    >>> host_and_port("[::1]:0")
    ('::1', 0)
    """
    wrong = partial(_invalid, address, usual_port)
    if "://" in address:
        host = address.partition("://")[2].partition("/")[0]
        raise wrong("it is no URL", host)
    host, colon, port = address.rpartition(":")
    bare = _unbracketed(address)
    if _is_ipv6(bare):
        is_whole = not (_is_ipv6(host) and port.isdecimal())
        form = f"[{bare}]" if is_whole else f"[{host}]:{port}"
        raise wrong("an IPv6 address has brackets, and a port behind them", form)
    if not colon:
        if _is_port(port):
            raise wrong("it has no host", f"127.0.0.1:{port}")
        raise wrong("it has no port", address)
    if not _is_port(port):
        raise wrong(f"its port is no number of 0 to {MAX_PORT}", host)
    inner = _unbracketed(host)
    if not inner:
        raise wrong("it has no host: 127.0.0.1 is this machine alone, 0.0.0.0 all of it")
    if not _is_ipv6(inner) if inner != host else re.search(r"[\s/:\[\]]", host):
        raise wrong("it names no host")
    return inner, int(port)


def _unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and int(text) <= MAX_PORT


def _is_ipv6(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


def _invalid(address: str, usual_port: int, why: str, host: str = "") -> AddressInvalidError:
    has_port = re.fullmatch(r"(?:\[.+\]|[^:]+):\d+", host) is not None
    form = host if has_port else f"{host or 'HOST'}:{usual_port}"
    return AddressInvalidError(
        f"{address!r} is no address: {why}; write {form}", address=address[:200]
    )
