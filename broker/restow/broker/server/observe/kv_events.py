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
from collections.abc import AsyncIterator
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


Event = dict[str, Any]


@dataclass(slots=True)
class Topic:
    """What is known of a topic: its messages from ``first`` to ``end`` are kept for replays."""

    engine_id: str
    first: int = 0
    end: int = 0
    groups: list[Event] = field(default_factory=list)
    """Events that name the groups; empty: all was cleared since."""
    events: list[Event] = field(default_factory=list)
    """Events that no message has yet."""

    def clear(self) -> None:
        """Tell that the engine holds nothing, unless that was told already."""
        if self.groups:
            self.groups, self.events = [], [CLEARED]


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
                topic.clear()
        for change in part.changes:
            teller = change.teller
            if change.kind in (Kind.BEGAN, Kind.ENDED):
                for topic in self._topics.values():
                    if topic.engine_id == teller.engine.engine_id:
                        topic.clear()
            if change.kind is Kind.BEGAN:
                self._topic(teller, teller.revision)
            elif change.kind is not Kind.ENDED and not change.salt:
                self._topic(teller, change.revision).events.append(_event(change))
        told = [(name, topic) for name, topic in self._topics.items() if topic.events]
        messages = [self._keep(name, topic, at_s) for name, topic in told]
        while len(self._topics) > MAX_TOPICS:
            self._topics.popitem(last=False)
        return messages

    def _topic(self, teller: Announcements, revision: str) -> Topic:
        """Return a topic, which has named its groups."""
        other = f":{revision}" if teller.keeps and revision != teller.revision else ""
        name = f"kv@{teller.engine.engine_id}@{teller.model.name}{other}".encode()
        topic = self._topics.setdefault(name, Topic(teller.engine.engine_id))
        self._topics.move_to_end(name)
        if not topic.groups:
            topic.groups = [_stored(teller, rule, b"") for rule in teller.rules]
            topic.events = [CLEARED, *topic.groups]
        return topic

    def _keep(self, name: bytes, topic: Topic, at_s: float) -> Message:
        message = Message(name, topic.end, _batch(at_s, topic.events))
        topic.end, topic.events = topic.end + 1, []
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
        kept = [one for one in self._kept if one.sequence >= first and one.topic.startswith(topic)]
        return lost + kept, bool(lost)


def _batch(at_s: float, events: list[Event]) -> bytes:
    return msgspec.msgpack.encode([at_s, events, 0])


def _event(change: Change) -> Event:
    """Return the event that hashes are held or not, with its fields in vLLM's order."""
    teller = change.teller
    (rule,) = [rule for rule in teller.rules if rule.name == change.group]
    stored = _stored(teller, rule, change.hashes)
    if change.kind is Kind.HELD:
        return stored
    names = "block_hashes", "medium", "group_idx", "locality"
    return {"type": "BlockRemoved"} | {name: stored[name] for name in names}


def _stored(teller: Announcements, rule: GroupRule, hashes: bytes) -> Event:
    tokens, words = teller.form.quantum_tokens, teller.form.hash_bytes // 8
    kind, window = "full_attention", {}
    if rule.block_quanta == SNAPSHOT:
        kind = "mamba"
    elif rule.window_quanta:
        kind = "sliding_window"
        window = {"kv_cache_spec_sliding_window": rule.window_quanta * tokens}
    return {
        "type": "BlockStored",
        # Their last 64 bits, as vLLM publishes them unless told otherwise.
        "block_hashes": np.frombuffer(hashes, ">u8")[words - 1 :: words].tolist(),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": (rule.block_quanta or 1) * tokens,
        "lora_id": None,
        "medium": "CPU" if teller.keeps else "GPU",
        "lora_name": teller.model.adapter or None,
        "group_idx": teller.rules.index(rule),
        "kv_cache_spec_kind": kind,
        **window,
        "locality": "REMOTE" if teller.keeps else "LOCAL",  # a store is away from every engine
    }


class Publisher:
    """Publishes a tenant's changes while the broker leads. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub, watcher: Watcher) -> None:
        """Prepare; `open` opens sockets."""
        self._hub, self._watcher = hub, watcher
        self._events = KvEvents()
        self._announced_s, self._lacking = hub.now_s(), False
        """When all was announced last, and whether a replay has lacked something since."""

    async def publish(self, socket: Any) -> None:
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
                for message in self._events.messages(part, time.time()):
                    await socket.send_multipart(message.frames)

    async def answer(self, socket: Any) -> None:
        """Answer requests for replays: a sequence number of 8 bytes, and perhaps a topic."""
        while True:
            match await socket.recv_multipart():
                case [caller, b"", first, *topic] if len(first) == 8 and len(topic) < 2:
                    await self._replay(socket, caller, int.from_bytes(first, "big"), *topic)

    async def _replay(self, socket: Any, caller: bytes, first: int, topic: bytes = b"") -> None:
        if self._hub.standing.term:
            messages, lacking = self._events.replay(first, topic, time.time())
            self._lacking = self._lacking or lacking
            for message in messages:
                await socket.send_multipart((caller, b"", *message.frames), copy=False)
        await socket.send_multipart((caller, b"", b"", END, b""))


def _open(context: zmq.asyncio.Context, kind: int, endpoint: str, waiting: int) -> Any:
    """Return a socket. Raises `ListenError`."""
    socket: Any = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, waiting)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    # As in vLLM: an address of another machine is a subscriber that listens.
    listens = kind == zmq.ROUTER or "*" in endpoint or endpoint.startswith("ipc:")
    try:
        socket.bind(endpoint) if listens else socket.connect(endpoint)
    except zmq.ZMQError as error:
        words = f"KV events can't be published at {endpoint}: {error}"
        raise ListenError(words, listen=endpoint) from None
    return socket


@contextlib.asynccontextmanager
async def publishing(
    hub: Hub, tenant: str, endpoint: str, replay_endpoint: str
) -> AsyncIterator[None]:
    """Publish a tenant's holdings inside the ``async with``. Raises `ListenError`."""
    log = get_logger("restow.broker")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("KV events are published no longer", exc_info=error)

    context = zmq.asyncio.Context()
    try:
        with hub.watchers.watching(tenant) as watcher:
            publisher = Publisher(hub, watcher)
            works = [publisher.publish(_open(context, zmq.PUB, endpoint, MAX_WAITING))]
            if replay_endpoint:
                # A whole replay must fit, because a ROUTER drops what does not.
                asked = _open(context, zmq.ROUTER, replay_endpoint, 2 * (MAX_KEPT + 1))
                works.append(publisher.answer(asked))
            tasks = [asyncio.create_task(work) for work in works]
            for task in tasks:
                task.add_done_callback(ended)
            yield
            for task in tasks:
                task.cancel()
    finally:
        context.destroy(linger=0)
