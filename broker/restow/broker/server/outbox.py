"""Messages on their way to one stream: whatever has queued up leaves as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from restow.broker.core.engines.account import Account
from restow.broker.errors import (
    DirectoryFullError,
    QueueFullError,
    QuotaExceededError,
    RestowError,
)
from restow.v1 import agent_link_pb2, broker_pb2

Batch = TypeVar("Batch")

MAX_BATCH = 512
MAX_BATCH_BYTES = 16 << 20
MAX_QUEUE_BYTES = 256 << 20
LAGS_AT, LAGS_BYTES = 4096, 32 << 20
COPIES = 3
"""Of a batch that is being sent: as messages, as bytes, and as gRPC's own."""
AGENT_FREE_BYTES = 64 << 10
ENGINE_FREE_BYTES = 1 << 20
"""Of each stream's that count for nothing: a tenant at its quota must hear of that."""
MESSAGE_BYTES = 128
"""What a message counts beside its size, copies included."""


class Outbox(Generic[Batch]):
    """A bounded queue of batches that messages are written into where they lie.

    Batches grow with the load by themselves: no message waits for others, and none is copied. A
    reader that lets more than ``max_queue`` messages (rounded up to whole batches),
    ``MAX_QUEUE_BYTES`` or more than its tenant's account has room for pile up loses its stream:
    nothing more is sent, because what follows a gap could be misunderstood.
    """

    def __init__(
        self,
        make: Callable[[], Batch],
        max_queue: int,
        on_full: Callable[[], object] | None = None,
        account: Account | None = None,
        free_bytes: int = 0,
    ) -> None:
        """Start empty and open; ``make`` makes an empty batch.

        ``account`` carries what waits here above ``free_bytes``, until the next batch is taken.
        ``on_full`` is called once when the reader has lost its stream, from inside `open`: it must
        only take a note.
        """
        self._make = make
        self._account, self._free_bytes = account, free_bytes
        self._carried_bytes = self._carried_in_taken = self._carried_in_last = 0
        self._on_full = on_full
        self._full: deque[tuple[Batch, int, int, int]] = deque()
        """Each with its messages, its bytes, and what the account carries for it."""
        self._in_full = self._bytes_in_full = 0
        self._last = make()
        self._in_last = 0
        self._bytes_in_last = 0
        self._max_full = max(1, -(-max_queue // MAX_BATCH))
        self._wake = asyncio.Event()
        self._end: RestowError | None = None
        self._closed = False

    def open(self, size_bytes: int = 0) -> Batch:
        """The batch to add exactly one message to; never blocks.

        ``size_bytes`` is about the message's size, if it may be large: a batch must not outgrow
        what a stream may carry at once.
        """
        self._bytes_in_last += size_bytes
        if self._in_last >= MAX_BATCH or self._bytes_in_last > MAX_BATCH_BYTES:
            full_bytes = self._bytes_in_last - size_bytes
            self._bytes_in_full += full_bytes
            if len(self._full) >= self._max_full or self._bytes_in_full > MAX_QUEUE_BYTES:
                self._overflow()
            else:
                self._full.append((self._last, self._in_last, full_bytes, self._carried_in_last))
                self._in_full += self._in_last
            self._start()
            self._bytes_in_last = size_bytes
        if self._closed or not self._carry(MESSAGE_BYTES + COPIES * size_bytes):
            return self._make()
        self._in_last += 1
        self._wake.set()
        return self._last

    def _carry(self, size_bytes: int) -> bool:
        """Have the account carry so many more; without room in it the stream is lost."""
        if self._account is None:
            return True
        carried_bytes = self._carried_bytes + size_bytes
        if carried_bytes > self._free_bytes:
            try:
                self._account.carry(min(size_bytes, carried_bytes - self._free_bytes))
            except (QuotaExceededError, DirectoryFullError) as error:
                self._overflow(f", and there is no room for more: {error.message}")
                return False
        self._carried_bytes = carried_bytes
        self._carried_in_last += size_bytes
        return True

    def _deliver(self, size_bytes: int) -> None:
        if self._account is not None:
            self._carried_bytes -= size_bytes
            left = max(self._carried_bytes, self._free_bytes)
            self._account.deliver(max(0, self._carried_bytes + size_bytes - left))

    def drop(self) -> None:
        """Close it for good: nobody will take any more."""
        self.close()
        self._clear()
        self._deliver(self._carried_in_taken)
        self._carried_in_taken = 0

    def _clear(self) -> None:
        self._full.clear()
        self._in_full = self._bytes_in_full = 0
        self._start()
        self._deliver(self._carried_bytes - self._carried_in_taken)

    def _start(self) -> None:
        self._last = self._make()
        self._in_last = self._bytes_in_last = self._carried_in_last = 0

    def _overflow(self, why: str = "") -> None:
        self._clear()
        self.close(QueueFullError(f"too many messages wait: the stream reads too slowly{why}"))
        if self._on_full is not None:
            self._on_full()

    def close(self, end: RestowError | None = None) -> None:
        """Let the stream end after what is queued, with an error if one is given."""
        if not self._closed:
            self._closed = True
            self._end = end
        self._wake.set()

    @property
    def closed(self) -> bool:
        """Whether the stream ends, though whoever reads it may not have heard of it yet."""
        return self._closed

    def has_room(self, size_bytes: int) -> bool:
        """Whether a message may be added that others can do without, and the stream be safe."""
        if self.waiting > LAGS_AT or self._bytes_in_full + self._bytes_in_last > LAGS_BYTES:
            return False
        carried_bytes = self._carried_bytes + MESSAGE_BYTES + COPIES * size_bytes
        if self._account is None or carried_bytes <= self._free_bytes:
            return True
        try:
            self._account.check(carried_bytes - max(self._carried_bytes, self._free_bytes))
        except (QuotaExceededError, DirectoryFullError):
            return False
        return True

    @property
    def waiting(self) -> int:
        """How many messages have not been taken."""
        return self._in_full + self._in_last

    async def take(self) -> Batch | None:
        """Wait for a batch; None when closed. Raises the error of `close`.

        The one that was taken before has been sent.
        """
        self._deliver(self._carried_in_taken)
        self._carried_in_taken = 0
        while True:
            if self._full:
                batch, in_full, full_bytes, self._carried_in_taken = self._full.popleft()
                self._in_full -= in_full
                self._bytes_in_full -= full_bytes
                return batch
            if self._in_last:
                batch, self._carried_in_taken = self._last, self._carried_in_last
                self._start()
                return batch
            if self._closed:
                if self._end is not None:
                    raise self._end
                return None
            self._wake.clear()
            await self._wake.wait()


AgentOutbox = Outbox[agent_link_pb2.ConnectResponse]
EngineOutbox = Outbox[broker_pb2.SessionResponse]
