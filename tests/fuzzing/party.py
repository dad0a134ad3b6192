"""A hostile party: what it knows, and engines with sessions and agents that say anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from broker.fakes import P_BLOCKS, PAGES, POSITION, UnusedBlocks, answer_at_once
from fuzzing.door import Stream, Violation, methods
from fuzzing.good_engine import CONNECT, REGISTER, SESSION, hello
from fuzzing.house import LAYOUTS, TENANTS, VICTIM, House
from fuzzing.messages import Known
from restow.broker.core.engine_events import Directory
from restow.broker.rpc import wire
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb

REFS = [
    pb.EngineRef(engine_id=name, incarnation=f"{name}-{life}")
    for name, life in (("x", 1), ("x", 2), ("y", 1), ("x", 1), ("y", 1), ("z", 1))
]
STRANGERS = [
    pb.EngineRef(engine_id="good-p", incarnation="another"),
    pb.EngineRef(engine_id="nobody", incarnation="x-1"),
]
RANKS = {"x": 1, "y": 2, "z": 2}
"""TP sizes of the hostile engines."""
COPYING = link.CopyCosts(
    seconds_per_launch=1e-4,
    seconds_per_copy=1e-6,
    seconds_per_element=4e-9,
    copy_bytes_per_second=5e9,
)
_REGIONS = [one for layout in LAYOUTS.values() for one in layout.ranks[0].regions]
LAYOUT_MESSAGES: dict[int, Any] = {tp: wire.layout_to_proto(one) for tp, one in LAYOUTS.items()}


def hellos(refs: Sequence[pb.EngineRef], tenant: str) -> list[link.Hello]:
    """Return Hellos from agents of these engines that the broker takes."""
    return [
        grown(hello(LAYOUTS[RANKS[ref.engine_id]], ref, rank, host, tenant), size)
        for ref in refs
        if ref.engine_id in RANKS
        for rank in range(RANKS[ref.engine_id])
        for host, size in (
            ("", 0),
            ("host-good-p", 0),
            ("", 2**63),
            (f"host-{ref.engine_id}", 0),
        )
    ]


def grown(one: link.Hello, size_bytes: int) -> link.Hello:
    """Give a Hello as much memory as ``size_bytes`` allows, if that is not 0."""
    if size_bytes:
        strides = {region.name: region.page_stride_bytes for region in _REGIONS}
        for region in one.regions:
            region.base_address = 1
            region.page_count = (size_bytes - 1) // strides[region.name]
        one.staging_bytes = size_bytes - 1
    return one


_HELLOS = {tenant: hellos(REFS, tenant) for tenant in TENANTS}
_WHOLE = [wire.block_lists(P_BLOCKS), wire.block_lists(UnusedBlocks())]
_PARTS = [
    [wire.block_list("attention", [1, 2])],
    [wire.block_list("attention", [3], 2), wire.block_list("state", [4])],
]
HASHES = bytes(range(160))
"""Five of a chain."""
_FORMS = [
    pb.HashForm(algorithm="sha256", quantum_tokens=16, hash_bytes=32),
    pb.HashForm(algorithm="sha256", quantum_tokens=8, hash_bytes=32),
]
PREFIXES = [
    pb.Prefix(form=form, hashes=HASHES[:size], end_hash=end_hash, salt=salt)
    for form, size, end_hash in ((_FORMS[0], 64, HASHES[64:96]), (_FORMS[1], 160, b""))
    for salt in ("", "s")
]
"""Such as stand at `POSITION`, or would in an engine that hashes otherwise."""
_VALUES: dict[str, Sequence[Any]] = {
    "engine_id": ["x", "y", "z"],
    "source_engine": ["good-p", "x"],
    "destination_engine": ["good-d", "y"],
    "incarnation": ["x-1", "y-1", "z-1"],
    "restow.v1.Publication.blocks": [*_WHOLE, *_WHOLE, *_PARTS],
    "restow.v1.Demand.blocks": _WHOLE,
    "restow.v1.Demand.position_tokens": [0, 0, POSITION],
    "position_tokens": [POSITION],
    "held_tokens": [0, 0, 16, POSITION],
    "lease_ms": [0, 1000, 30_000, 240_000],
    "timeout_ms": [0, 1000, 30_000],
    "final": [True, True, False],
    "repeated": [False, False, True],
    "detail": ["", "words"],
    "reason": ["", "", "", "BROKEN"],
    "rank": [0, 1],
    "dst_rank": [0, 1],
    "agent_name": ["/good-p/good-p-life/0", "default/x/x-1/0", "other/x/x-1/0"],
    "host": ["", "host-x", "host-good-p"],
    "staging_bytes": [0, 1 << 20],
    "address": [4096],
    "bytes": [0, 64, 1 << 20],
    "elapsed_us": [0, 100],
    "limit": [0, 3],
    "beginning": ["", "good", "n"],
    "ended_within_s": [0.0, 30.0],
    "message_id": [0, 1, 2],
    "restow.v1.Holdings.number": [1, 1, 2, 3],
    "hashes": [HASHES, HASHES[:64], HASHES[:96], HASHES[32:96], HASHES[64:96]],
    "end_hash": [b"", HASHES[64:96]],
    "restow.v1.Demand.content": [b""],
    "restow.v1.Demand.readers": [0, 0, 0, 2],
    "parent": [b"", HASHES[:32]],
    "group": ["attention", "state"],
    "salt": ["", "s"],
    "below_tokens": [0, 64, 65],
    "name": ["m"],
    "revision": ["v1"],
    "adapter": [""],
    "quantisation": [""],
}
_BODIES = link.AgentMessage.DESCRIPTOR.oneofs_by_name["body"].fields
_FIRST = frozenset({"restow.v1.AgentMessage.hello"})
_LATER = frozenset(one.full_name for one in _BODIES) - _FIRST
_COSTS: dict[str, Sequence[Any]] = {
    "restow.v1.CopyCosts": [COPYING],
    "restow.v1.ReadCosts": [link.ReadCosts(seconds_per_descriptor=2e-6, read_bytes_per_second=7e9)],
}


RELEASE = "/restow.v1.Admin/ReleaseHandoff"


def _commands_of(directory: Directory, tenant: str) -> list[str]:
    of_tenant = directory.commands.tenants.get(tenant)
    return [*of_tenant.by_id] if of_tenant is not None else []


def known(house: House, tenant: str, path: str = "", first: bool = False) -> Known:
    """Return what a party of a tenant knows now, and may say on a call.

    ``first``: the call's first message is meant. In its own tenant the party may name the good
    engines exactly. In theirs it does not take their place: who may register is another guard's
    business.
    """
    directory = house.hub.directory
    probes = [probe.number for probe in directory.probing._running.values()]
    numbers = [*directory.ledger.by_number, *probes, 1]
    names = [*(name for _, name in [*directory.ledger.live][-4:]), VICTIM, "new"]
    if path == RELEASE and tenant == TENANTS[0]:  # which would be their right
        names = [name for name in names if name != VICTIM]
    refs = [*REFS]
    if tenant != TENANTS[0]:
        refs += [*STRANGERS, house.p.ref, house.d.ref]
    elif path != REGISTER:
        refs += STRANGERS
    return Known(
        {
            **_VALUES,
            "handoff": numbers,
            "number": numbers,
            "handoff_id": names,
            "command_id": [*_commands_of(directory, tenant), "new"],
        },
        {
            "restow.v1.EngineRef": refs,
            "restow.v1.Hello": _HELLOS[tenant],
            "restow.v1.Layout": list(LAYOUT_MESSAGES.values()),
            "restow.v1.HashForm": _FORMS,
            "restow.v1.Prefix": PREFIXES,
            **_COSTS,
        },
        _LATER if first else _FIRST,
        frozenset({"restow.v1.Demand.prefix"}),
    )


MAX_STREAMS = 24
METHODS = methods()
STREAMING = sorted(path for path, one in METHODS.items() if one.client_streaming)
ANSWERING = sorted(
    path for path, one in METHODS.items() if one.server_streaming and path not in STREAMING
)
"""Methods that answer one request by a stream."""
UNARY = sorted(METHODS.keys() - {*STREAMING, *ANSWERING})


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
        if stream.path in ANSWERING:
            self.seen[f"{METHODS[stream.path].name} heard"] += 1
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
