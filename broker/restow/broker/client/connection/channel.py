"""Channels to a broker, their credentials, and the check against use after a fork.

gRPC, NIXL and threads belong to one process. If a child that was forked later uses them, it hangs
or dies without a message, so every public object checks its process first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from restow.broker.addresses import checked_targets
from restow.broker.client.connection.brokers import Brokers
from restow.broker.client.connection.errors import ForkedError, proxy_options
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import (
    CLIENT_PINGS,
    MAX_FROM_BROKER_BYTES,
    MAX_TO_BROKER_BYTES,
    PINGS_OF_SEVERAL,
)
from restow.broker.trust.errors import (
    READ_STEP,
    READABLE,
    TokenOverPlaintextError,
    TrustSettingsError,
    is_readable_by_all,
)
from restow.broker.trust.key_files import Stamp, read_authorities, read_key_pair, stamp_of
from restow.broker.trust.tokens import read_secret


class OwnProcess:
    """Remembers the first process that used the client, and refuses processes forked after that."""

    def __init__(self) -> None:
        """Begin without a process."""
        self._pid: int | None = None

    def check(self) -> None:
        """Check the process before gRPC, NIXL or threads are used. Raises `ForkedError`."""
        pid = os.getpid()
        if self._pid is None:
            self._pid = pid
        elif self._pid != pid:
            raise ForkedError(self._pid, pid)


OWN_PROCESS = OwnProcess()
"""Shared by all objects, because gRPC's state in a process belongs to all of them."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files with which a client identifies itself and checks the broker.

    Without files it uses plaintext, which only a broker without TLS accepts. Raises
    `TokenOverPlaintextError` or `TrustSettingsError` for files that do not fit together.
    """

    tls_ca: Path | None = None
    """Authorities that check the broker's certificate; if given, TLS is used."""
    tls_cert: Path | None = None
    """The client's certificate, for a broker with --client-ca."""
    tls_key: Path | None = None
    """The key of that certificate; give both or neither."""
    token_file: Path | None = None
    """The client's token, for a broker with --tokens. Read again for every call."""

    def __post_init__(self) -> None:
        """Raise `TokenOverPlaintextError` or `TrustSettingsError` for files that do not fit."""
        if self.token_file is not None and self.tls_ca is None:
            raise TokenOverPlaintextError(
                f"token file {self.token_file} is given without an authority, but a token is never "
                f"sent in plaintext: name the file that checks the broker's certificate "
                f"(--tls-ca, RESTOW_TLS_CA)",
                file=self.token_file,
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise TrustSettingsError(
                "a client's certificate and its key must be given together (--tls-cert and "
                "--tls-key, RESTOW_TLS_CERT and RESTOW_TLS_KEY)"
            )
        if self.tls_cert is not None and self.tls_ca is None:
            raise TrustSettingsError(
                f"certificate {self.tls_cert} is given without an authority: name the file that "
                f"checks the broker's certificate (--tls-ca, RESTOW_TLS_CA)"
            )

    @classmethod
    def of(
        cls,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> Credentials:
        """Return credentials; files that are not given come from the environment.

        ``tls_ca`` comes from RESTOW_TLS_CA, ``tls_cert`` from RESTOW_TLS_CERT, ``tls_key`` from
        RESTOW_TLS_KEY, ``token_file`` from RESTOW_TOKEN_FILE. Raises `TokenOverPlaintextError` or
        `TrustSettingsError`.
        """
        given = (tls_ca, tls_cert, tls_key, token_file)
        names = [field.name for field in fields(cls)]
        files = (
            value or os.environ.get("RESTOW_" + name.upper())
            for name, value in zip(names, given, strict=True)
        )
        return cls(*(Path(value) if value else None for value in files))

    @property
    def secure(self) -> bool:
        """Whether TLS is used."""
        return self.tls_ca is not None

    def stamp(self) -> Stamp:
        """Return a value that changes when certificates are renewed, so that channels reopen."""
        return stamp_of([path for path in (self.tls_ca, self.tls_cert, self.tls_key) if path])

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials of a secure channel, without the token.

        Raises `KeyFileError`, `TokenFileError`, and `TrustSettingsError` unless `secure`.
        """
        if self.tls_ca is None:
            raise TrustSettingsError("these credentials have no authority, so they are plaintext")
        if self.token_file is not None:
            read_secret(self.token_file)  # so that a wrong file is reported now
        authorities = read_authorities(self.tls_ca)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authorities)
        pair = read_key_pair(self.tls_cert, self.tls_key)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.certificate)


def channel_showing(
    credentials: Credentials, module: Any, address: str, options: Sequence[tuple[str, Any]]
) -> Any:
    """Return a channel of ``module`` (`grpc` or `grpc.aio`) with the credentials.

    Raises as `Credentials.for_channel` if TLS is used.
    """
    if not credentials.secure:
        return module.insecure_channel(address, options=options)
    channel = module.secure_channel(address, credentials.for_channel(), options=options)
    token_file = credentials.token_file
    return channel if token_file is None else AuthorizedChannel(channel, token_file)


class AuthorizedChannel:
    """A secure channel of `grpc` or `grpc.aio`, whose calls carry a token.

    The token is read again for every call, which raises `TokenFileError` if that fails. Like all
    parts of a call, it is sent only after the server has proved its identity.
    """

    def __init__(self, channel: Any, token_file: Path) -> None:
        """Take over the channel."""
        self._channel, self._token_file = channel, token_file
        self.unary_unary = self._showing(channel.unary_unary)
        self.unary_stream = self._showing(channel.unary_stream)
        self.stream_unary = self._showing(channel.stream_unary)
        self.stream_stream = self._showing(channel.stream_stream)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the channel."""
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        """Return the channel."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the channel."""
        await self._channel.close()

    # -- inside -----------------------------------------------------------------------------------

    def _showing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method factory, so that calls carry the token."""

        def make_showing(*words: Any, **more: Any) -> Callable[..., Any]:
            method = make(*words, **more)

            def call(*sent: Any, metadata: Any = None, **options: Any) -> Any:
                shown = ("authorization", f"Bearer {read_secret(self._token_file)}")
                return method(*sent, metadata=(*(metadata or ()), shown), **options)

            return call

        return make_showing


DEFAULT_BROKER = "127.0.0.1:7350"
CONNECT_S = 5.0
NEXT_S = 1.0
MOST_DOUBLINGS = 4

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FROM_BROKER_BYTES),
    ("grpc.max_send_message_length", MAX_TO_BROKER_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses would grow to two minutes, and callers pause by themselves.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Otherwise a name that moved to another address would be looked up only after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def channel_options(several: bool = False) -> tuple[tuple[str, int | str], ...]:
    """Return the options of a channel, to one of ``several`` brokers or to the only broker.

    Raises `AddressInvalidError` for an invalid proxy.
    """
    pings = PINGS_OF_SEVERAL if several else CLIENT_PINGS
    return (*CHANNEL_OPTIONS, *pings, *proxy_options())


def broker_address(given: str | None = None) -> str:
    """Return the address of the broker or brokers: given, or RESTOW_BROKER, or the default.

    Raises `AddressInvalidError`.
    """
    return ",".join(checked_targets(given or os.environ.get("RESTOW_BROKER") or DEFAULT_BROKER))


PLAINTEXT = Credentials()


def open_channel(
    address: str, credentials: Credentials = PLAINTEXT, several: bool = False
) -> grpc.aio.Channel:
    """Return a channel on the running loop, to one of ``several`` brokers or to the only broker.

    Raises `AddressInvalidError`, `ForkedError`, and like `channel_showing`.
    """
    OWN_PROCESS.check()
    channel: grpc.aio.Channel = channel_showing(
        credentials, grpc.aio, address, channel_options(several)
    )
    return channel


def patience_s(rounds: int) -> float:
    """Return how long to wait for one of several brokers, after ``rounds`` without an answer.

    >>> [patience_s(rounds) for rounds in (0, 1, 4, 5000)]
    [1.0, 2.0, 16.0, 16.0]
    """
    return NEXT_S * 2.0 ** min(rounds, MOST_DOUBLINGS)


class RenewedChannel:
    """The channel to a broker, reopened for another broker or renewed certificates.

    Belongs to one loop.
    """

    def __init__(self, brokers: Brokers, credentials: Credentials) -> None:
        """Prepare; the first call of `channel` opens the channel."""
        self._brokers, self._credentials = brokers, credentials
        self._channel: grpc.aio.Channel | None = None
        self._opened: tuple[str, Stamp] = ("", ())
        """Address and stamp of the open channel."""
        self._log = get_logger("restow.trust")

    @property
    def present(self) -> grpc.aio.Channel | None:
        """The open channel, or None."""
        return self._channel

    async def channel(self) -> grpc.aio.Channel:
        """Return the channel; calls on an earlier channel end if it was reopened.

        Raises `KeyFileError` or `TokenFileError`; then an earlier channel stays open.
        """
        wanted = (self._brokers.current, self._credentials.stamp())
        if self._channel is None or wanted != self._opened:
            several = self._brokers.several
            channel = open_channel(self._brokers.current, self._credentials, several)
            for path in filter(None, (self._credentials.tls_key, self._credentials.token_file)):
                if is_readable_by_all(path):
                    self._log.warning(READABLE, file=str(path), next=READ_STEP)
            await self.close()
            self._channel, self._opened = channel, wanted
        return self._channel

    async def connects(self) -> bool:
        """Return whether the channel connects in time, with retries. Raises like `channel`.

        It waits up to ``CONNECT_S``; then the files may have changed. With several brokers it gives
        up at the first failure or after ``NEXT_S``, to try another broker. That time doubles after
        each round without a broker, so that thousands of clients do not come at once.
        """
        channel = await self.channel()
        several = self._brokers.several
        with contextlib.suppress(TimeoutError):
            within_s = patience_s(self._brokers.rounds) if several else CONNECT_S
            async with asyncio.timeout(within_s):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if several and state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        return False
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        # If thousands of clients return at once, a busy loop may learn of its connection too late.
        return channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel. May be called again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
