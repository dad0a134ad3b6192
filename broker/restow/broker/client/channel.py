"""Channels to a broker, with the options that all parties share."""

from __future__ import annotations

import os

import grpc

DEFAULT_BROKER = "127.0.0.1:7350"

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own pauses would grow to two minutes; whoever calls pauses by itself.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def broker_address(given: str | None = None) -> str:
    """The broker's address: as given, else of RESTOW_BROKER, else the default."""
    return given or os.environ.get("RESTOW_BROKER") or DEFAULT_BROKER


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to the broker, on the running loop."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
