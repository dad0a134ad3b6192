"""Publish what engines hold as vLLM's KV events, over ZeroMQ.

Messages have vLLM's form: topic, sequence number, and a batch in msgpack. Each engine has a topic,
``kv@ENGINE@MODEL``, and a sequence of its own, as if it published by itself. A store's states of
another revision than its own have the topic ``kv@STORE@MODEL:REVISION``, because events name no
revision. What has a salt is not published, because a removal names no salt.

Hashes are numbers of 64 bits, which all routers read. Tokens are not published: the broker knows
hashes alone. So ``token_ids`` is empty, as in events of vLLM's own offloading connector. An event
without hashes names each group before its first hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from restow.broker.core.prefix.changes import Change, Kind, Part
from restow.broker.core.prefix.prefixes import Announcements
from restow.broker.core.prefix.rules import SNAPSHOT, GroupRule
from restow.broker.errors import ListenError
from restow.broker.logs import get_logger
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.watching import LOOK_S, Watcher

MAX_KEPT = 10_000
MAX_KEPT_BYTES = 64 << 20
"""Limits of what is kept for replays, of all topics together."""
MAX_TOPICS = 20_000
MAX_WAITING = 1000
"""Messages that wait for a subscriber; it misses what comes then, and may ask for a replay."""
MAX_REQUEST_BYTES = 4096
ANNOUNCE_EVERY_S = 5.0
"""How often everything is announced again at most, because replays lacked something."""
END = (-1).to_bytes(8, "big", signed=True)
CLEARED = {"type": "AllBlocksCleared"}


class Message(NamedTuple):
    """A batch of events as it is sent."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        """Return the frames of the message."""
        return self.topic, self.sequence.to_bytes(8, "big"), self.payload


@dataclass(slots=True)
class Topic:
    """What is known of a topic."""

    engine_id: str
    first: int = 0
    """Sequence number of the oldest message that is kept."""
    end: int = 0
    """Sequence number of the next message."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Events that name the groups; empty: all was cleared since."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events that no message has yet."""


class KvEvents:
    """Makes messages of changes, and keeps the last of them for replays. Does no I/O."""

    def __init__(self) -> None:
        """Begin without topics."""
        self._topics: OrderedDict[bytes, Topic] = OrderedDict()
        """The least recently used first."""
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0

    def messages(self, part: Part, at_s: float) -> list[Message]:
        """Return the messages that tell ``part``, as of wall-clock time ``at_s``."""
        if part.begins:
            for topic in self._topics.values():
                _clear(topic)
        for change in part.changes:
            if change.kind in (Kind.BEGAN, Kind.ENDED):
                for topic in self._topics.values():
                    if topic.engine_id == change.teller.engine.engine_id:
                        _clear(topic)
                if change.kind is Kind.BEGAN:
                    self._topic(change.teller, change.teller.revision)
            elif not change.salt:
                topic = self._topic(change.teller, change.revision)
                topic.events.append(_event(change))
        return [self._keep(name, topic, at_s) for name, topic in self._told()]

    def _topic(self, teller: Announcements, revision: str) -> Topic:
        """Return a topic, which has named its groups."""
        other = f":{revision}" if teller.keeps and revision != teller.revision else ""
        name = f"kv@{teller.engine.engine_id}@{teller.model.name}{other}".encode()
        topic = self._topics.setdefault(name, Topic(teller.engine.engine_id))
        self._topics.move_to_end(name)
        if not topic.groups:
            topic.groups = [_stored(teller, rule, [], b"") for rule in teller.rules]
            topic.events = [CLEARED, *topic.groups]
        return topic

    def _told(self) -> Iterator[tuple[bytes, Topic]]:
        """Yield topics with events, and drop topics beyond the limit."""
        yield from [(name, topic) for name, topic in self._topics.items() if topic.events]
        while len(self._topics) > MAX_TOPICS:
            self._topics.popitem(last=False)

    def _keep(self, name: bytes, topic: Topic, at_s: float) -> Message:
        events, topic.events = topic.events, []
        message = Message(name, topic.end, _batch(at_s, events))
        topic.end += 1
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            gone = self._kept.popleft()
            self._kept_bytes -= len(gone.payload)
            if (of := self._topics.get(gone.topic)) is not None:
                of.first = gone.sequence + 1
        return message

    def replay(self, first: int, topic: bytes, at_s: float) -> tuple[list[Message], bool]:
        """Return the messages from sequence number ``first`` on, and whether any are not kept.

        In place of these stands a message after which the topic holds nothing, so that nobody
        believes in what was removed meanwhile. All topics are meant that begin with ``topic``.
        """
        lost = [
            Message(name, known.first - 1, _batch(at_s, [CLEARED, *known.groups]))
            for name, known in self._topics.items()
            if known.first > first and name.startswith(topic)
        ]
        kept = (message for message in self._kept if message.sequence >= first)
        return [*lost, *(message for message in kept if message.topic.startswith(topic))], bool(
            lost
        )


def _batch(at_s: float, events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([at_s, events, 0])


def _clear(topic: Topic) -> None:
    """Tell that the topic holds nothing, unless it was told already."""
    if topic.groups:
        topic.groups, topic.events = [], [CLEARED]


def _event(change: Change) -> dict[str, Any]:
    """Return the event of a change."""
    teller = change.teller
    hashes = _numbers(change.hashes, teller.form.hash_bytes)
    (rule,) = [rule for rule in teller.rules if rule.name == change.group]
    if change.kind is Kind.HELD:
        return _stored(teller, rule, hashes, change.parent)
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": _medium(teller),
        "group_idx": teller.rules.index(rule),
        "locality": _locality(teller),
    }


def _numbers(hashes: bytes, hash_bytes: int) -> list[int]:
    """Return the last 64 bits of each hash, as vLLM publishes them unless told otherwise."""
    words: list[int] = np.frombuffer(hashes, ">u8").reshape(-1, hash_bytes // 8)[:, -1].tolist()
    return words


def _stored(
    teller: Announcements, rule: GroupRule, hashes: list[int], parent: bytes
) -> dict[str, Any]:
    """Return the event that blocks are held, with the fields in vLLM's order."""
    tokens = teller.form.quantum_tokens
    kind, window = "full_attention", {}
    if rule.block_quanta == SNAPSHOT:
        kind = "mamba"
    elif rule.window_quanta:
        kind = "sliding_window"
        window = {"kv_cache_spec_sliding_window": rule.window_quanta * tokens}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": _numbers(parent, len(parent))[0] if parent else None,
        "token_ids": [],
        "block_size": (rule.block_quanta or 1) * tokens,
        "lora_id": None,
        "medium": _medium(teller),
        "lora_name": teller.model.adapter or None,
        "group_idx": teller.rules.index(rule),
        "kv_cache_spec_kind": kind,
        **window,
        "locality": _locality(teller),
    }


def _medium(teller: Announcements) -> str:
    return "CPU" if teller.keeps else "GPU"


def _locality(teller: Announcements) -> str:
    """Return where a router should see the blocks: a store's are away from every engine."""
    return "REMOTE" if teller.keeps else "LOCAL"


class Publisher:
    """Publishes a tenant's changes while the broker leads. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub, watcher: Watcher, endpoint: str, replay_endpoint: str) -> None:
        """Open the sockets. Raises `ListenError`."""
        self.events = KvEvents()
        self._hub, self._watcher = hub, watcher
        self._announced_s, self._lacking = hub.now_s(), False
        """When all was announced last, and whether a replay has lacked something since."""
        self._context = zmq.asyncio.Context()
        self._sockets: list[Any] = []
        self._published = self._open(zmq.PUB, endpoint, MAX_WAITING)
        self._asked: Any = None
        if replay_endpoint:
            # A whole replay must fit, because a ROUTER drops what does not.
            self._asked = self._open(zmq.ROUTER, replay_endpoint, 2 * (MAX_KEPT + 1))

    def _open(self, kind: int, endpoint: str, waiting: int) -> Any:
        socket: Any = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, waiting)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            # As in vLLM: an address of another machine is a subscriber that listens.
            if kind == zmq.PUB and not ("*" in endpoint or endpoint.startswith("ipc:")):
                socket.connect(endpoint)
            else:
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ListenError(
                f"KV events can't be published at {endpoint}: {error}", listen=endpoint
            ) from None
        return socket

    async def publish(self) -> None:
        """Publish changes as they come."""
        while True:
            now_s = self._hub.now_s()
            if self._lacking and now_s - self._announced_s >= ANNOUNCE_EVERY_S:
                self._announced_s, self._lacking = now_s, False
                self._watcher.follower.begin_again()
            part = await self._watcher.next()
            standing = self._hub.standing
            while not (standing.term and standing.is_sure()):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(LOOK_S)
            if part is not None:
                for message in self.events.messages(part, time.time()):
                    await self._published.send_multipart(message.frames)

    async def answer(self) -> None:
        """Answer requests for replays."""
        while self._asked is not None:
            match await self._asked.recv_multipart():
                case [caller, b"", first, *topic] if len(first) == 8 and len(topic) < 2:
                    await self._replay(caller, int.from_bytes(first, "big"), *topic)

    async def _replay(self, caller: bytes, first: int, topic: bytes = b"") -> None:
        """Send what is kept; have everything announced again if that lacks something."""
        if self._hub.standing.term:
            messages, lacking = self.events.replay(first, topic, time.time())
            self._lacking = self._lacking or lacking
            for message in messages:
                await self._asked.send_multipart((caller, b"", *message.frames), copy=False)
        await self._asked.send_multipart((caller, b"", b"", END, b""))

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets:
            socket.close()
        self._context.term()


@contextlib.asynccontextmanager
async def publishing(
    hub: Hub, tenant: str, endpoint: str, replay_endpoint: str
) -> AsyncIterator[None]:
    """Publish a tenant's holdings inside the ``async with``. Raises `ListenError`."""
    log = get_logger("restow.broker")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("KV events are published no longer", exc_info=error)

    with hub.watchers.watching(tenant) as watcher:
        publisher = Publisher(hub, watcher, endpoint, replay_endpoint)
        tasks = [asyncio.create_task(one) for one in (publisher.publish(), publisher.answer())]
        for task in tasks:
            task.add_done_callback(ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            publisher.close()
