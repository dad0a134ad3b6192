"""Channels to a broker, with the options that all parties share."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import grpc

from restow.broker.client.credentials import Credentials
from restow.broker.rpc.pings import CLIENT_PINGS
from restow.broker.trust.reloaded import Stamp

DEFAULT_BROKER = "127.0.0.1:7350"
CONNECT_S = 5.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    *CLIENT_PINGS,
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses would grow to two minutes; whoever calls pauses by itself.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def broker_address(given: str | None = None) -> str:
    """The broker's address: as given, else of RESTOW_BROKER, else the default."""
    return given or os.environ.get("RESTOW_BROKER") or DEFAULT_BROKER


def open_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel, on the running loop."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_secure_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel with TLS, on the running loop. Raises like `Credentials.for_channel`."""
    secured = credentials.for_channel()
    return grpc.aio.secure_channel(address, secured, options=CHANNEL_OPTIONS)


class Line:
    """The one channel to a broker, opened anew when certificates were renewed. On one loop."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        open_plain: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        """Prepare; ``open_plain`` opens a channel without TLS."""
        self._address, self._credentials, self._open_plain = address, credentials, open_plain
        self._channel: grpc.aio.Channel | None = None
        self._stamp: Stamp = ()

    @property
    def is_open(self) -> bool:
        """Whether there is a channel."""
        return self._channel is not None

    async def channel(self) -> grpc.aio.Channel:
        """The channel; calls on an earlier one end if it was opened anew.

        Raises `KeyFileError` or `TokenFileError`; then an earlier channel is left as it was.
        """
        stamp = self._credentials.stamp()
        if self._channel is None or stamp != self._stamp:
            channel = self._open()
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

    def _open(self) -> grpc.aio.Channel:
        if self._credentials.secure:
            return open_secure_channel(self._address, self._credentials)
        return self._open_plain(self._address)
