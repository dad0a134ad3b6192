"""How large messages may be: nothing is sent that the other side can't take."""

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
