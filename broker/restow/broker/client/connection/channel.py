"""gRPC, NIXL and threads live in one process: a child that is forked later has none of them.

Used there they hang or kill the child without a word; so every public object asks first.
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
    """The first process that asked; those that it forked after that are refused."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self._pid: int | None = None

    def check(self) -> None:
        """To be called before gRPC, NIXL or their threads are used. Raises `ForkedError`."""
        pid = os.getpid()
        if self._pid is None:
            self._pid = pid
        elif self._pid != pid:
            raise ForkedError(self._pid, pid)


OWN_PROCESS = OwnProcess()
"""Of all objects: what gRPC has in a process belongs to none of them alone."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Names the files by which a client shows who it is, and by what it knows the broker.

    None at all: plaintext, which only a broker without TLS understands. Raises
    `TokenOverPlaintextError` or `TrustSettingsError` for files that make no sense together.
    """

    tls_ca: Path | None = None
    """Authorities that the broker's certificate is checked against; given: TLS is spoken."""
    tls_cert: Path | None = None
    """The client's certificate, for a broker with --client-ca."""
    tls_key: Path | None = None
    """The key of that certificate; both are given or neither."""
    token_file: Path | None = None
    """The client's token, for a broker with --tokens. Read again for every call."""

    def __post_init__(self) -> None:
        """Raise `TokenOverPlaintextError` or `TrustSettingsError` for what makes no sense."""
        if self.token_file is not None and self.tls_ca is None:
            raise TokenOverPlaintextError(
                f"token file {self.token_file} is given without an authority: a token is never "
                f"sent in plaintext; name the file that the broker's certificate is checked "
                f"against (--tls-ca, RESTOW_TLS_CA)",
                file=self.token_file,
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise TrustSettingsError(
                "a client's certificate and its key are given both or not at all (--tls-cert and "
                "--tls-key, RESTOW_TLS_CERT and RESTOW_TLS_KEY)"
            )
        if self.tls_cert is not None and self.tls_ca is None:
            raise TrustSettingsError(
                f"certificate {self.tls_cert} is given without an authority: name the file that "
                f"the broker's certificate is checked against (--tls-ca, RESTOW_TLS_CA)"
            )

    @classmethod
    def of(
        cls,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> Credentials:
        """Return credentials of what is given; each that is not comes from the environment.

        ``tls_ca`` from RESTOW_TLS_CA, ``tls_cert`` from RESTOW_TLS_CERT, ``tls_key`` from
        RESTOW_TLS_KEY, ``token_file`` from RESTOW_TOKEN_FILE. Raises `TokenOverPlaintextError` or
        `TrustSettingsError`.
        """
        given = (tls_ca, tls_cert, tls_key, token_file)
        names = [field.name for field in fields(cls)]
        found = (
            value or os.environ.get("RESTOW_" + name.upper())
            for name, value in zip(names, given, strict=True)
        )
        return cls(*(Path(value) if value else None for value in found))

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.tls_ca is not None

    def stamp(self) -> Stamp:
        """Return what changes when certificates are renewed: then channels are opened anew."""
        return stamp_of([one for one in (self.tls_ca, self.tls_cert, self.tls_key) if one])

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return what a secure channel of gRPC's is opened with, of all but the token.

        Raises `KeyFileError`, `TokenFileError`, and `TrustSettingsError` unless `secure`.
        """
        if self.tls_ca is None:
            raise TrustSettingsError("there is no authority: these credentials are plaintext")
        if self.token_file is not None:
            read_secret(self.token_file)  # What is wrong with it is told now, too.
        authorities = read_authorities(self.tls_ca)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authorities)
        pair = read_key_pair(self.tls_cert, self.tls_key)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.certificate)


def channel_showing(
    credentials: Credentials, module: Any, address: str, options: Sequence[tuple[str, Any]]
) -> Any:
    """Return a channel of ``module``, which is `grpc` or `grpc.aio`, by the credentials.

    Raises as `Credentials.for_channel` if there is TLS.
    """
    if not credentials.secure:
        return module.insecure_channel(address, options=options)
    channel = module.secure_channel(address, credentials.for_channel(), options=options)
    token_file = credentials.token_file
    return channel if token_file is None else AuthorizedChannel(channel, token_file)


class AuthorizedChannel:
    """A secure channel, of `grpc` or `grpc.aio`, whose calls show a token.

    The token is read again for every call, which raises `TokenFileError` if it can't be. It is
    sent when the other side has proved who it is, as all of a call is.
    """

    def __init__(self, channel: Any, token_file: Path) -> None:
        """Take over the channel."""
        self._channel, self._token_file = channel, token_file
        self.unary_unary = self._showing(channel.unary_unary)
        self.unary_stream = self._showing(channel.unary_stream)
        self.stream_unary = self._showing(channel.stream_unary)
        self.stream_stream = self._showing(channel.stream_stream)

    def __getattr__(self, name: str) -> Any:
        """Return what else the channel has."""
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        """Use as a context."""
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
        """Return what makes a method whose calls show the token."""

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
    # gRPC's own pauses would grow to two minutes; whoever calls pauses by itself.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Else a name that has moved to another address is looked up after 30 s only.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def channel_options(several: bool = False) -> tuple[tuple[str, int | str], ...]:
    """What every channel is opened with, to one of ``several`` brokers or the only one.

    Raises `AddressInvalidError` for a proxy that is none.
    """
    pings = PINGS_OF_SEVERAL if several else CLIENT_PINGS
    return (*CHANNEL_OPTIONS, *pings, *proxy_options())


def broker_address(given: str | None = None) -> str:
    """The address of the broker, or of several: as given, else of RESTOW_BROKER, else the default.

    Raises `AddressInvalidError`.
    """
    return ",".join(checked_targets(given or os.environ.get("RESTOW_BROKER") or DEFAULT_BROKER))


PLAINTEXT = Credentials()


def open_channel(
    address: str, credentials: Credentials = PLAINTEXT, several: bool = False
) -> grpc.aio.Channel:
    """A channel on the running loop, to one of ``several`` brokers or the only one.

    Raises `AddressInvalidError`, `ForkedError`, and like `channel_showing`.
    """
    OWN_PROCESS.check()
    channel: grpc.aio.Channel = channel_showing(
        credentials, grpc.aio, address, channel_options(several)
    )
    return channel


def patience_s(rounds: int) -> float:
    """How long one of several brokers has to be connected, after ``rounds`` in which none was.

    >>> [patience_s(rounds) for rounds in (0, 1, 4, 5000)]
    [1.0, 2.0, 16.0, 16.0]
    """
    return NEXT_S * 2.0 ** min(rounds, MOST_DOUBLINGS)


class RenewedChannel:
    """The one channel to a broker, opened anew for another one or renewed certificates.

    On one loop.
    """

    def __init__(self, brokers: Brokers, credentials: Credentials) -> None:
        """Prepare: the first call of `channel` opens it."""
        self._brokers, self._credentials = brokers, credentials
        self._channel: grpc.aio.Channel | None = None
        self._opened: tuple[str, Stamp] = ("", ())
        """What the channel was opened to, and with."""
        self._log = get_logger("restow.trust")

    @property
    def present(self) -> grpc.aio.Channel | None:
        """The channel as it is now; None: none is open."""
        return self._channel

    async def channel(self) -> grpc.aio.Channel:
        """The channel; calls on an earlier one end if it was opened anew.

        Raises `KeyFileError` or `TokenFileError`; then an earlier channel is left as it was.
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
        """Whether the channel is connected now, or soon: it tries by itself. Raises like `channel`.

        After ``CONNECT_S`` it is not, and files are worth another look; where there are other
        brokers, who are worth a try, at the first failure or after ``NEXT_S``. After each round in
        which none let us in after twice as long: of thousands that come at once some wait.
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
        # Where thousands come back at once, the word of it reaches a busy loop too late.
        return channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel. May be repeated."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
