"""A hostile party: engines with sessions and agents that say and hear anything."""

from __future__ import annotations

from collections import Counter
from typing import Any
from zlib import crc32

from broker.fakes import P_BLOCKS, PAGES, POSITION, answer_at_once
from fuzzing.door import Stream, Violation, methods
from fuzzing.good_engine import CONNECT, REGISTER, SESSION
from fuzzing.hostile_words import HASHES, LAYOUT_MESSAGES, PREFIXES, RANKS, REFS, hellos
from fuzzing.house import TENANTS, House
from restow.broker.rpc import wire
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

MAX_STREAMS = 24
METHODS = methods()
UNARY = sorted(path for path, one in METHODS.items() if not one.client_streaming)
STREAMING = sorted(METHODS.keys() - set(UNARY))


class Party:
    """Its streams, and the orders that its agents heard."""

    def __init__(self, house: House, seen: Counter[str]) -> None:
        self.house, self.seen = house, seen
        self.streams: list[Stream] = []
        self.orders: list[tuple[Stream, link.AgentOrder]] = []
        self.offers: list[tuple[Stream, pb.Offer]] = []
        self._owner: dict[Stream, str] = {}
        for tenant in TENANTS:
            self.come(tenant, REFS[0])
            self.come(tenant, REFS[2])

    def come(self, tenant: str, ref: pb.EngineRef) -> None:
        """Start an engine with its session and its agents, as a good engine would start."""
        request = pb.RegisterEngineRequest(engine=ref, layout=LAYOUT_MESSAGES[RANKS[ref.engine_id]])
        self.house.call(REGISTER, request.SerializeToString(), tenant)
        self.open(SESSION, tenant, ref).say(pb.SessionRequest(engine=ref))
        for one in {one.rank: one for one in hellos([ref], tenant)}.values():
            self.introduce(self.open(CONNECT, tenant, ref), one)
        self.house.wait(0.001)

    def open(self, path: str, tenant: str, ref: pb.EngineRef | None = None) -> Stream:
        """Open a stream; if there are many, cut the oldest one for it."""
        if len(self.streams) >= MAX_STREAMS:
            self.streams.pop(0).cut()
        stream = self.house.door.stream(path, tenant)
        if ref is not None:
            self._owner[stream] = ref.engine_id
        self.streams.append(stream)
        stream.hear = lambda response: self._hear(stream, response)
        return stream

    def of(self, path: str, tenant: str, ref: pb.EngineRef) -> list[Stream]:
        """Return the open streams that an engine opened well."""
        return [
            one
            for one in self.streams
            if (one.path, one.tenant) == (path, tenant) and self._owner.get(one) == ref.engine_id
        ]

    def introduce(self, stream: Stream, one: link.Hello, *more: link.AgentMessage) -> None:
        """Send a Hello, and perhaps more."""
        stream.say(link.ConnectRequest(messages=[link.AgentMessage(hello=one), *more]))

    def look(self) -> None:
        """Drop the streams that have ended. Raises what no handler may raise."""
        for stream in list(self.streams):
            if stream.over:
                self.streams.remove(stream)
                self.orders = [one for one in self.orders if one[0] is not stream]
                self.offers = [one for one in self.offers if one[0] is not stream]
                if stream.answer is not None:
                    name = METHODS[stream.path].name
                    self.seen[f"{name} ended {stream.answer.reason or 'OK'}"] += 1

    def leave(self) -> None:
        """Cut all streams."""
        for stream in self.streams:
            stream.cut()

    def _hear(self, stream: Stream, response: Any) -> None:
        if stream.path == SESSION:
            for event in response.events:
                body = event.WhichOneof("body")
                word = getattr(getattr(event, body), "reason", "") or "OK"
                self.seen[f"{body} {word}"] += 1
                if body == "offer":
                    self.offers.append((stream, event.offer))
            return
        for order in response.orders:
            self.seen[f"order {order.WhichOneof('body')}"] += 1
            check_order(order)
            if answer_at_once(order):
                self.orders.append((stream, order))


def check_order(order: link.AgentOrder) -> None:
    """Check that what the broker passes on from one agent to another is sound."""
    runs = [(one.staged_address, one.staged_bytes) for one in order.execute.sources]
    runs.append((order.probe.address, order.probe.bytes if order.probe.agent_name else 0))
    for one in order.peer.regions:
        runs += [(one.base_address, one.page_count)]
        if one.device_id < 0 or one.memory not in link.MemoryKind.values():
            raise Violation(f"a region where no memory is: {one}")
    for address, size_bytes in runs:
        if size_bytes < 0 or (size_bytes and not 0 < address <= 2**63 - size_bytes):
            raise Violation(f"{size_bytes} bytes at {address}: {order}")


def publication(name: str, lease_ms: int) -> pb.EngineMessage:
    """Return the message that publishes a handoff whole."""
    whole = pb.Publication(
        handoff_id=name,
        blocks=wire.block_lists(P_BLOCKS),
        position_tokens=POSITION,
        final=True,
        lease_ms=lease_ms,
    )
    return pb.EngineMessage(publish=whole)


def demand(name: str, timeout_ms: int) -> pb.EngineMessage:
    """Return a demand for a handoff; its blocks follow from the name, so that runs repeat."""
    first = 11 + crc32(name.encode()) % (PAGES - 16)
    blocks = {group: [first + one for one in ids] for group, ids in P_BLOCKS.items()}
    wish = pb.Demand(handoff_id=name, blocks=wire.block_lists(blocks), timeout_ms=timeout_ms)
    return pb.EngineMessage(request=wish)


def holdings() -> pb.EngineMessage:
    """Return the message that the engine holds the first prefix's state, in both groups."""
    held = [
        pb.HeldRun(group="attention", hashes=HASHES[:96]),
        pb.HeldRun(group="state", hashes=HASHES[64:96]),
    ]
    return pb.EngineMessage(holdings=pb.Holdings(number=1, form=PREFIXES[0].form, held=held))


def wanted(name: str, timeout_ms: int) -> pb.EngineMessage:
    """Return a demand for the state of the first prefix, whoever holds it."""
    message = demand(name, timeout_ms)
    message.request.prefix.CopyFrom(PREFIXES[0])
    message.request.position_tokens = POSITION
    return message


def keep() -> pb.EngineMessage:
    """Return the message that says that the state of the first prefix is worth keeping."""
    return pb.EngineMessage(keep=pb.Keep(prefix=PREFIXES[0], position_tokens=POSITION))


def given(offer: pb.Offer) -> pb.EngineMessage:
    """Return the message that publishes the offered state whole."""
    message = publication(offer.handoff_id, 30_000)
    message.publish.content = offer.content
    message.publish.position_tokens = offer.position_tokens
    return message


def declined(offer: pb.Offer) -> pb.EngineMessage:
    """Return the message that declines an offer because the state is held no longer."""
    return pb.EngineMessage(decline_offer=pb.DeclineOffer(handoff_id=offer.handoff_id))


def fence(name: str) -> link.ConnectRequest:
    """Return the message that a rank's part of a handoff is complete."""
    message = link.AgentMessage(fenced=link.Fenced(handoff_id=name))
    return link.ConnectRequest(messages=[message])
