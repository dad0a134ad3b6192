"""Channels to a broker, with the options that all parties share."""

from __future__ import annotations

import asyncio
import contextlib
import os

import grpc

from restow.broker.addresses import checked_targets
from restow.broker.client.connection.authorized_channel import channel_showing
from restow.broker.client.connection.brokers import Brokers
from restow.broker.client.connection.credentials import Credentials
from restow.broker.client.connection.own_process import OWN_PROCESS
from restow.broker.client.connection.proxies import proxy_options
from restow.broker.logs import get_logger
from restow.broker.rpc.pings import CLIENT_PINGS, PINGS_OF_SEVERAL
from restow.broker.rpc.sizes import MAX_FROM_BROKER_BYTES, MAX_TO_BROKER_BYTES
from restow.broker.trust.modes import READ_STEP, READABLE, is_readable_by_all
from restow.broker.trust.reloaded import Stamp

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
