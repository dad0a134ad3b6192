"""Addresses as people write them: ``HOST:PORT``, ``[IPv6]:PORT``, ``unix:PATH``."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import partial

from restow.broker.errors import AddressInvalidError

DEFAULT_PORT = 7350
HTTP_PORT = 9464
"""Usual for metrics (OpenTelemetry's exporter of Prometheus metrics)."""
MAX_PORT = 65535
_SCHEME = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):")
"""gRPC's own, which it reads by itself."""
_OWN_LIST = re.compile(r"ipv[46]:")
"""Of these, those that may name several addresses."""


def checked_target(address: str) -> str:
    """What a client connects to, as it is. Raises `AddressInvalidError`.

    >>> checked_target("broker.example:7350"), checked_target("unix:/run/broker.sock")
    ('broker.example:7350', 'unix:/run/broker.sock')
    """
    if not _SCHEME.match(address) and host_and_port(address)[1] == 0:
        raise _wrong(address, DEFAULT_PORT, f"port 0 is for listening; ports are 1 to {MAX_PORT}")
    return address


def checked_targets(addresses: str) -> tuple[str, ...]:
    """What a client connects to, one after the other. Raises `AddressInvalidError`.

    >>> checked_targets("a.example:7350, b.example:7350")
    ('a.example:7350', 'b.example:7350')
    >>> checked_targets("ipv4:10.0.0.1:7,10.0.0.2:7")
    ('ipv4:10.0.0.1:7,10.0.0.2:7',)
    """
    if _OWN_LIST.match(addresses):
        return (checked_target(addresses),)
    return tuple(checked_target(one.strip()) for one in addresses.split(","))


def checked_listener(address: str) -> str:
    """What a server listens on, as it is; port 0 takes a free one. Raises `AddressInvalidError`."""
    if not re.fullmatch(r"unix:.+", address):
        host_and_port(address)
    return address


def checked_http(address: str) -> str:
    """The same for HTTP, and no ``unix:PATH``."""
    host_and_port(address, HTTP_PORT)
    return address


def host_and_port(address: str, usual_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return both, an IPv6 address without its brackets.

    Raises `AddressInvalidError`, which shows the right form, with ``usual_port`` where none is
    given.

    >>> host_and_port("[::1]:0")
    ('::1', 0)
    """
    wrong = partial(_wrong, address, usual_port)
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


def _wrong(address: str, usual_port: int, why: str, host: str = "") -> AddressInvalidError:
    has_port = re.fullmatch(r"(?:\[.+\]|[^:]+):\d+", host) is not None
    form = host if has_port else f"{host or 'HOST'}:{usual_port}"
    return AddressInvalidError(
        f"{address!r} is no address: {why}; write {form}", address=address[:200]
    )
