"""Hearing a stream of messages: each in its order, and no stream for so long that others wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from restow.broker.errors import RestowError
from restow.broker.server.fleet.standing import Stand
from restow.broker.server.outbox import Outbox

Message = TypeVar("Message")
Batch = TypeVar("Batch")

MAX_AT_ONCE = 512
"""Messages of one batch, after which others have their turn: a batch may hold millions."""


async def hear_stream(
    first: Iterable[Message],
    requests: AsyncIterator[Any],
    outbox: Outbox[Any],
    hear: Callable[[Message, float], bool | None],
    now_s: Callable[[], float],
    stand: Stand,
) -> None:
    """Hear the ``first`` messages and those of all ``requests``, until the stream ends.

    ``hear`` takes a message and the time, and says whether that took long. What it raises, a
    `RestowError`, ends the stream; the end of ``requests`` does, too. One that ends is heard no
    more: who does not read it could write for ever.
    """
    try:
        await hear_batch(first, outbox, hear, now_s, stand)
        async for request in requests:
            if outbox.closed:
                return
            await hear_batch(request.messages, outbox, hear, now_s, stand)
            del request  # the next may be long in coming
    except RestowError as error:
        outbox.close(error)
    finally:
        outbox.close()


async def hear_batch(
    messages: Iterable[Message],
    outbox: Outbox[Any],
    hear: Callable[[Message, float], bool | None],
    now_s: Callable[[], float],
    stand: Stand,
) -> None:
    """Hear what came at once, while the broker may act."""
    at_s = now_s()
    standing = stand.standing
    long: bool | None = False
    for index, message in enumerate(messages, 1):
        if long or not index % MAX_AT_ONCE:
            await asyncio.sleep(0)
            at_s = now_s()
        if standing.among_others:  # who is alone is always sure
            if not standing.is_sure():
                await standing.sure()
                at_s = now_s()
            if not stand.holds_now:
                return
        if outbox.closed:
            return
        long = hear(message, at_s)


async def batches_to_say(outbox: Outbox[Batch], stand: Stand) -> AsyncIterator[Batch]:
    """Yield what is to be written on a stream; raises the error that the outbox was closed with.

    What was decided in an epoch that is over since is left out.
    """
    while (batch := await outbox.take()) is not None:
        if await stand.holds():
            yield batch
