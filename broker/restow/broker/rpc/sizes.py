"""Size limits of messages, and how often connections are pinged."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeVar

from restow.broker.errors import MessageTooLargeError

MAX_TO_BROKER_BYTES = 16 << 20
"""Limit of a gRPC message; brokers and daemons refuse larger messages."""
MAX_FROM_BROKER_BYTES = 64 << 20
MAX_BATCH_BYTES = 2 << 20
"""Limit of a batch of several messages; small, so that batches are processed while others are
sent."""
MAX_SAID_BYTES = MAX_TO_BROKER_BYTES - (1 << 20)
"""Limit of a single message; the rest is room for the batch around it and for a repetition."""


class Sized(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:
        """Return the encoded size."""


Said = TypeVar("Said", bound=Sized)


def check_size(what: str, size_bytes: int) -> None:
    """Raise `MessageTooLargeError` if ``what`` exceeds the limit of a message."""
    if size_bytes > MAX_SAID_BYTES:
        raise MessageTooLargeError(
            f"{what} takes {size_bytes} bytes, but a message may have at most {MAX_SAID_BYTES}: "
            f"split it (a publication may come in chunks, `final=False`)",
            bytes=size_bytes,
            limit=MAX_SAID_BYTES,
        )


def take_batch(outbox: deque[Said], most: int) -> list[Said]:
    """Take the oldest messages of a queue: at least one, and as many as fit into a batch."""
    batch = [outbox.popleft()]
    size_bytes = batch[0].ByteSize()
    while outbox and len(batch) < most:
        size_bytes += outbox[0].ByteSize()
        if size_bytes > MAX_BATCH_BYTES:
            break
        batch.append(outbox.popleft())
    return batch


PING_EVERY_S = 3.0
"""Clients ping an idle connection this often, so that no proxy closes it as idle."""
ANSWER_S = 10.0
"""Long enough for a process of an overloaded host, which is slow and not dead."""
_SERVER_EVERY_S = 4.0
"""Longer than a client's interval, because a client's ping makes the server's unnecessary."""
NOTICED_S = _SERVER_EVERY_S + ANSWER_S
"""Latest time by which both ends notice a dead connection."""
SEVERAL_EVERY_S = 0.5
SEVERAL_ANSWER_S = 0.8
"""With several brokers, notice a dead broker about as fast as its lease ends."""
LEAST_EVERY_S = 0.3
"""Servers treat more frequent pings as abuse."""


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
