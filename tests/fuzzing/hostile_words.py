"""What a hostile party knows: words that are good at their place, and those of the good engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker.fakes import P_BLOCKS, POSITION, UnusedBlocks
from fuzzing.good_engine import REGISTER, hello
from fuzzing.house import LAYOUTS, TENANTS, VICTIM, House
from fuzzing.messages import Known
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


def known(house: House, tenant: str, path: str = "", first: bool = False) -> Known:
    """Return what a party of a tenant knows now, and may say on a call.

    ``first``: the call's first message is meant. In its own tenant the party may name the good
    engines exactly. In theirs it does not take their place: who may register is another guard's
    business.
    """
    directory = house.hub.directory
    probes = [probe.number for probe, _ in directory.probing._by_hosts.values()]
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
        {**_VALUES, "handoff": numbers, "number": numbers, "handoff_id": names},
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
