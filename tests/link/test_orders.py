"""What the numbers of an order may be: those with which a sum would wrap around are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from restow.agents.binding.pages import MAX_PAGES, Blocks, TokenRange
from restow.agents.execute.orders import peer_from_proto, probe_from_proto
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.memory.errors import OrderInvalidError, ProgramInvalidError
from restow.agents.memory.regions import HOST, is_memory
from restow.broker.errors import PageCountError
from restow.broker.layout.values import MAX_PAGE_BYTES, MAX_PAGES_PER_BLOCK
from restow.broker.planner import GroupPair, PageForm, Program
from restow.v1 import agent_link_pb2 as pb

MOST = 2**63 - 1


def peer(stride: int = 4096, **changes: Any) -> pb.Peer:
    region = pb.RegionMemory(name="r", base_address=1 << 20, page_count=8, page_stride_bytes=stride)
    for name, value in changes.items():
        setattr(region, name, value)
    return pb.Peer(agent_name="p", regions=[region])


def test_a_peer_has_memory_where_memory_can_be() -> None:
    last = MOST - 8 * 4096 + 1
    assert peer_from_proto(peer(base_address=last)).regions.base_address.tolist() == [last]
    largest = peer(MAX_PAGE_BYTES, page_count=2**27 - 1, base_address=1)
    assert peer_from_proto(largest).page_strides_bytes == (MAX_PAGE_BYTES,)


@pytest.mark.parametrize(
    ("stride", "changes"),
    [
        (4096, {"base_address": MOST - 8 * 4096 + 2}),
        (4096, {"base_address": MOST}),
        (4096, {"base_address": 0}),
        (4096, {"base_address": -(2**63)}),
        (4096, {"page_count": 0}),
        (4096, {"page_count": -1}),
        (4096, {"page_count": MOST}),
        (4096, {"page_count": 2**52}),
        (4096, {"device_id": -1}),
        (4096, {"memory": 77}),
        (0, {}),
        (-1, {}),
        (MAX_PAGE_BYTES + 1, {}),
        (MOST, {"page_count": 1, "base_address": 1}),
    ],
)
def test_a_peer_of_impossible_memory_is_refused(stride: int, changes: dict[str, int]) -> None:
    with pytest.raises(OrderInvalidError, match="which is impossible"):
        peer_from_proto(peer(stride, **changes))


def test_a_peer_with_memory_at_several_places_is_refused() -> None:
    mixed = peer()
    mixed.regions.add().CopyFrom(mixed.regions[0])
    assert peer_from_proto(mixed).place == HOST
    mixed.regions[1].memory = pb.MEMORY_KIND_CUDA
    with pytest.raises(OrderInvalidError, match="several places"):
        peer_from_proto(mixed)


@pytest.mark.parametrize(
    ("address", "size_bytes", "possible"),
    [
        (1, 1, True),
        (1, MOST, True),
        (MOST, 1, True),
        (MOST, 2, False),
        (2, MOST, False),
        (0, 1, False),
        (-1, 1, False),
        (1, 0, False),
        (1, -1, False),
    ],
)
def test_the_ends_of_memory(address: int, size_bytes: int, possible: bool) -> None:
    assert is_memory(address, size_bytes) == possible
    probe = pb.Probe(number=1, bytes=size_bytes, agent_name="p", address=address)
    if possible:
        assert probe_from_proto(probe).address == address
    else:
        with pytest.raises(OrderInvalidError):
            probe_from_proto(probe)


def test_a_probe_that_reads_from_nobody_needs_no_address() -> None:
    assert probe_from_proto(pb.Probe(number=1, bytes=-5)).size_bytes == -5


def test_a_transport_is_that_to_somebody() -> None:
    with pytest.raises(OrderInvalidError, match="no agent to read from"):
        probe_from_proto(pb.Probe(number=1, bytes=64, name_transport=True))


def _program(pair: GroupPair) -> Program:
    return Program("p", 0, (pair,), ())


def test_the_pages_of_a_block_are_bounded() -> None:
    good = PageForm("g", 4, MAX_PAGES_PER_BLOCK)
    CheckedProgram(_program(GroupPair(good, good)))
    for count in (0, -1, MAX_PAGES_PER_BLOCK + 1, 2**31 - 1):
        bad = PageForm("g", 4, count)
        for pair in (GroupPair(bad, good), GroupPair(good, bad)):
            with pytest.raises(ProgramInvalidError, match="pages_per_block"):
                CheckedProgram(_program(pair))


def test_only_pages_that_hold_tokens_are_listed() -> None:
    form = PageForm("g", 16, 4)
    blocks = Blocks({"g": np.array([7, 2, 9], np.int64)})
    assert blocks.pages(form, TokenRange(0, 65)).tolist() == [28, 29, 30, 31, 8]
    assert blocks.pages(form, TokenRange(0, 64)).tolist() == [28, 29, 30, 31]
    whole = [*range(28, 32), *range(8, 12), *range(36, 40)]
    assert blocks.pages(form, TokenRange(0, 192)).tolist() == whole
    with pytest.raises(PageCountError):
        blocks.pages(form, TokenRange(0, 193))


def test_blocks_of_a_million_pages_cost_as_much_as_the_tokens_in_them() -> None:
    form = PageForm("g", 1, MAX_PAGES_PER_BLOCK)
    blocks = Blocks({"g": np.full(1 << 20, 2**31 - 1, np.int64)})
    pages = blocks.pages(form, TokenRange(0, 3))
    first = (2**31 - 1) * MAX_PAGES_PER_BLOCK
    assert pages.tolist() == [first, first + 1, first + 2]
    assert len(blocks.pages(form, TokenRange(0, MAX_PAGES))) == MAX_PAGES
    with pytest.raises(PageCountError, match="more than"):
        blocks.pages(form, TokenRange(2**31 - 2, 2**31 - 1))
