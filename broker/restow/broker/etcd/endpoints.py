"""Channels to etcd's members, of which one is asked until it fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator

import grpc

from restow.broker.addresses import host_and_port
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials
from restow.broker.errors import AddressInvalidError
from restow.broker.trust.key_files import Stamp

PATIENCE_S = 1.0
_NO_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"}
)
_ABOUT_CERTIFICATE = ": does it accept a certificate of ours (--etcd-cert, --etcd-key)?"
_NOT_SPOKEN = ": it speaks no TLS, which --etcd-ca asks for"
_NOT_ASKED = ": it speaks TLS, and was asked in plaintext (--etcd-ca)"
_OPTIONS = (
    # No pings: etcd takes more than one in five seconds for abuse, and calls have their own limits.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


class Endpoints:
    """The members of an etcd; opened anew when certificates were renewed. On one loop."""

    def __init__(self, addresses: tuple[str, ...], credentials: Credentials) -> None:
        """Prepare: the first call of `current` opens a channel."""
        self._addresses, self._credentials = addresses, credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stamp: Stamp = ()
        self._index = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._addresses)

    def __iter__(self) -> Iterator[str]:
        """All of them, as they were given."""
        return iter(self._addresses)

    @property
    def current(self) -> str:
        """The address that is asked now."""
        return self._addresses[self._index]

    def give_up(self, address: str) -> None:
        """Ask the next one, if ``address`` is asked still."""
        if address == self.current:
            self._index = (self._index + 1) % len(self._addresses)

    async def channel(self, address: str) -> grpc.aio.Channel:
        """A channel there. Raises `KeyFileError` and `ForkedError`."""
        OWN_PROCESS.check()
        stamp = self._credentials.stamp()
        if stamp != self._stamp:
            await self.close()
            self._stamp = stamp
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return self._channels[address]

    def _open(self, address: str) -> grpc.aio.Channel:
        if not self._credentials.secure:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials.for_channel(), options=_OPTIONS)

    async def close(self) -> None:
        """Close all channels. May be repeated."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def about_tls(self, address: str) -> str:
        """What is the matter if one side speaks TLS and the other does not; empty: nothing shows.

        gRPC only says that the connection failed.
        """
        try:
            host, port = host_and_port(address)
        except AddressInvalidError:  # gRPC's own forms
            return ""
        context = ssl.create_default_context(cafile=self._credentials.tls_ca)
        if not self._credentials.secure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            async with asyncio.timeout(PATIENCE_S):
                _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.close()
        except ssl.SSLCertVerificationError as error:
            return f": its certificate is not accepted here, {error.verify_message} (--etcd-ca)"
        except ssl.SSLError as error:
            speaks_tls = error.reason not in _NO_TLS
        except ConnectionResetError:
            speaks_tls = False
        except (OSError, TimeoutError):
            return ""
        else:
            speaks_tls = True
        if self._credentials.secure:
            return _ABOUT_CERTIFICATE if speaks_tls else _NOT_SPOKEN
        return _NOT_ASKED if speaks_tls else ""
