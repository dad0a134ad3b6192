"""Options of channels and servers: bounds of messages, and how often connections are pinged."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeVar

from restow.broker.errors import MessageTooLargeError

MAX_TO_BROKER_BYTES = 16 << 20
"""Of one message of gRPC; brokers and daemons take no larger ones."""
MAX_FROM_BROKER_BYTES = 64 << 20
MAX_BATCH_BYTES = 2 << 20
"""Of a batch of several: few enough that one is worked on while the next is written."""
MAX_SAID_BYTES = MAX_TO_BROKER_BYTES - (1 << 20)
"""Of what is said at once; the rest is room for the batch around it, and for saying it again."""


class Sized(Protocol):
    """A message of protobuf's."""

    def ByteSize(self) -> int:
        """As it travels."""


Said = TypeVar("Said", bound=Sized)


def check_size(what: str, size_bytes: int) -> None:
    """Raise `MessageTooLargeError` for ``what`` no broker takes."""
    if size_bytes > MAX_SAID_BYTES:
        raise MessageTooLargeError(
            f"{what} takes {size_bytes} bytes, and a message at most {MAX_SAID_BYTES}: say less at "
            f"once (a publication may come in chunks, `final=False`)",
            bytes=size_bytes,
            limit=MAX_SAID_BYTES,
        )


def take_batch(outbox: deque[Said], most: int) -> list[Said]:
    """Take the oldest of what waits, as much as travels together, and at least one message."""
    batch = [outbox.popleft()]
    size_bytes = batch[0].ByteSize()
    while outbox and len(batch) < most:
        size_bytes += outbox[0].ByteSize()
        if size_bytes > MAX_BATCH_BYTES:
            break
        batch.append(outbox.popleft())
    return batch


PING_EVERY_S = 3.0
"""An idle connection carries a ping as often, so no proxy that waits longer takes it for idle."""
ANSWER_S = 5.0
_SERVER_EVERY_S = 4.0
"""Longer than a client's: a ping that comes makes one of the server's own needless."""
NOTICED_S = _SERVER_EVERY_S + ANSWER_S
"""When both ends of a dead connection know, at the latest."""
SEVERAL_EVERY_S = 0.5
SEVERAL_ANSWER_S = 0.8
"""Where another broker may be asked: about as long as one waits for a lease of the dead one."""
LEAST_EVERY_S = 0.3
"""More frequent pings are taken for abuse."""


def _options(every_s: float, answer_s: float = ANSWER_S) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", int(every_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(answer_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    )


CLIENT_PINGS = _options(PING_EVERY_S)
PINGS_OF_SEVERAL = _options(SEVERAL_EVERY_S, SEVERAL_ANSWER_S)
SERVER_PINGS = (
    *_options(_SERVER_EVERY_S),
    ("grpc.http2.min_ping_interval_without_data_ms", int(LEAST_EVERY_S * 1000)),
)
