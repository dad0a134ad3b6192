"""Channels to a broker, with the options that all parties share."""

from __future__ import annotations

import asyncio
import contextlib
import os

import grpc

from restow.broker.client.credentials import Credentials
from restow.broker.rpc.pings import CLIENT_PINGS
from restow.broker.rpc.sizes import MAX_FROM_BROKER_BYTES, MAX_TO_BROKER_BYTES
from restow.broker.trust.reloaded import Stamp

DEFAULT_BROKER = "127.0.0.1:7350"
CONNECT_S = 5.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FROM_BROKER_BYTES),
    ("grpc.max_send_message_length", MAX_TO_BROKER_BYTES),
    *CLIENT_PINGS,
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses would grow to two minutes; whoever calls pauses by itself.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def broker_address(given: str | None = None) -> str:
    """The broker's address: as given, else of RESTOW_BROKER, else the default."""
    return given or os.environ.get("RESTOW_BROKER") or DEFAULT_BROKER


PLAINTEXT = Credentials()


def open_channel(address: str, credentials: Credentials = PLAINTEXT) -> grpc.aio.Channel:
    """A channel on the running loop. Raises like `Credentials.for_channel` if there is TLS."""
    if not credentials.secure:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    secured = credentials.for_channel()
    return grpc.aio.secure_channel(address, secured, options=CHANNEL_OPTIONS)


class RenewedChannel:
    """The one channel to a broker, opened anew when certificates were renewed. On one loop."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Prepare: the first call of `channel` opens it."""
        self._address, self._credentials = address, credentials
        self._channel: grpc.aio.Channel | None = None
        self._stamp: Stamp = ()

    async def channel(self) -> grpc.aio.Channel:
        """The channel; calls on an earlier one end if it was opened anew.

        Raises `KeyFileError` or `TokenFileError`; then an earlier channel is left as it was.
        """
        stamp = self._credentials.stamp()
        if self._channel is None or stamp != self._stamp:
            channel = open_channel(self._address, self._credentials)
            await self.close()
            self._channel, self._stamp = channel, stamp
        return self._channel

    async def connects(self) -> bool:
        """Whether the channel is connected now, or soon: it tries by itself. Raises like `channel`.

        After ``CONNECT_S`` it is not; then files are worth another look.
        """
        channel = await self.channel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
                return True
        return False

    async def close(self) -> None:
        """Close the channel. May be repeated."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
