"""Every order ends in an answer with a reason, whatever fails in it, and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agent_harness.handover import programs
from agent_harness.pair import Pair, pair
from restow.agents.binding.extents import Extents
from restow.agents.copying import copier as copying
from restow.agents.execute import executor
from restow.agents.execute.executor import Executor
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.errors import CopyFailedError, RegionInvalidError
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.agents.reading.nixl_transport import NixlTransport
from restow.broker.planner import Strategy
from restow.v1 import agent_link_pb2 as pb

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered")
NO_MEMORY = MemoryError("Unable to allocate 2.00 MiB for an array")
UNTHREADED = RuntimeError("can't start new thread")


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def staged_bytes(made: Pair) -> int:
    """Return the bytes of staging that are in use, over all agents."""
    figures = [agent.figures for agent in made.agents.values()]
    return sum(found.gather.used_bytes + found.scatter.used_bytes for found in figures)


@pytest.mark.parametrize(
    ("name", "strategy", "place", "part", "error", "reason"),
    [
        ("wide", Strategy.PACK, copying, "copy_pieces", FULL, "COPY_FAILED"),
        ("wide", Strategy.PACK, copying, "copy_pieces", NO_MEMORY, "INTERNAL"),
        ("wide", Strategy.SLICES, copying, "copy_pieces", BROKEN, "COPY_FAILED"),
        ("recompute", Strategy.RECOMPUTE, copying, "project_windows", FULL, "COPY_FAILED"),
        ("wide", Strategy.PACK, Extents, "chunks", NO_MEMORY, "INTERNAL"),
        ("wide", Strategy.SLICES, NixlTransport, "post", UNTHREADED, "INTERNAL"),
        ("wide", Strategy.WHOLE, executor, "joined_reads", ValueError("shapes differ"), "INTERNAL"),
    ],
    ids=["SCATTER", "SCATTER on the host", "CLEAR", "PROJECT", "digest", "READ", "bind"],
)
async def test_an_order_to_read_is_settled_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    strategy: Strategy,
    place: object,
    part: str,
    error: Exception,
    reason: str,
) -> None:
    async with pair(name, ranks=(1,)) as made:
        program = programs(made.case, strategy)[1]
        staged = await made.stage(program, 1, hashed=True)
        with monkeypatch.context() as patch:
            patch.setattr(place, part, failing(error))
            settled = await made.execute(program, 1, staged)
        assert (settled.handoff, settled.reason) == (1, reason)
        assert str(error) in settled.detail
        if part != "copy_pieces":  # by which snapshots are cleared, too
            made.check_cleared(1)
        assert not made.agents["D", 1].figures.scatter.used_bytes
        assert (await made.execute(program, 2, staged)).reason == ""
        made.check_whole(1)


@pytest.mark.parametrize(
    ("place", "part", "error", "reason"),
    [
        (copying, "copy_pieces", FULL, "COPY_FAILED"),
        (Extents, "chunks", NO_MEMORY, "INTERNAL"),
    ],
    ids=["GATHER", "digest"],
)
async def test_an_order_to_gather_is_answered_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, place: object, part: str, error: Exception, reason: str
) -> None:
    async with pair("wide", ranks=(1,)) as made:
        program = programs(made.case, Strategy.PACK)[1]
        with monkeypatch.context() as patch:
            patch.setattr(place, part, failing(error))
            staged = await made.stage(program, 1, hashed=True)
        assert {(one.dst_rank, one.reason) for one in staged.values()} == {(1, reason)}
        assert not staged_bytes(made)
        staged = await made.stage(program, 1, hashed=True)
        assert (await made.execute(program, 1, staged)).reason == ""
        made.check_whole(1)


async def test_a_measurement_is_answered_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair("wide", ranks=(1,)) as made:
        program = programs(made.case, Strategy.SLICES)[1]
        assert (await made.execute(program, 1, {}, hashed=False)).reason == ""  # peers are known
        holder, reader = await made.fake.agent("P", 0), await made.fake.agent("D", 1)
        hold = pb.Probe(number=7, bytes=4 << 20)
        holder.send(pb.AgentOrder(probe=hold))
        held = await holder.next()
        measure = pb.Probe(
            number=8,
            bytes=held.bytes,
            address=held.address,
            agent_name=holder.hello.agent_name,
        )
        named = pb.Probe(**{f.name: v for f, v in measure.ListFields()}, name_transport=True)
        holder.send(pb.AgentOrder(unprobe=pb.Unprobe(number=7)))
        monkeypatch.setattr(copying, "copy_pieces", failing(FULL))
        monkeypatch.setattr("subprocess.run", failing(UNTHREADED))
        monkeypatch.setattr("subprocess.Popen", failing(UNTHREADED))
        other = pb.Probe(number=7, bytes=2 << 20)  # the costs of the first size are known
        for stream, order, reason in (
            (holder, other, "COPY_FAILED"),
            (reader, measure, "COPY_FAILED"),
            (reader, named, "INTERNAL"),
        ):
            stream.send(pb.AgentOrder(probe=order))
            assert (await stream.next()).reason == reason
        assert not staged_bytes(made)


async def test_costs_are_measured_once_and_told_every_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair("wide", ranks=(1,)) as made:
        program = programs(made.case, Strategy.SLICES)[1]
        assert (await made.execute(program, 1, {}, hashed=False)).reason == ""  # peers are known
        holder, reader = await made.fake.agent("P", 0), await made.fake.agent("D", 1)
        told = []
        for number in (7, 8):
            holder.send(pb.AgentOrder(probe=pb.Probe(number=number, bytes=4 << 20)))
            held = await holder.next()
            name = holder.hello.agent_name
            order = pb.Probe(number=9, bytes=held.bytes, address=held.address, agent_name=name)
            reader.send(pb.AgentOrder(probe=order))
            read = await reader.next()
            assert (held.reason, read.reason) == ("", "")
            told.append((held.copying, read.copying, read.reading))
            holder.send(pb.AgentOrder(unprobe=pb.Unprobe(number=number)))
            monkeypatch.setattr(copying, "copy_pieces", failing(FULL))
        assert told[0] == told[1]
        assert told[0][2].read_bytes_per_second > 0


async def test_a_full_device_does_not_keep_snapshots_of_a_failed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The zeroes were made when the agent began.
    async with pair("wide", ranks=(1,)) as made:
        for part in ("zeros", "zeros_like", "empty", "full"):
            monkeypatch.setattr(torch, part, failing(FULL))
        program = programs(made.case, Strategy.SLICES)[1]
        settled = await made.execute(program, 1, {}, hashed=True)
        assert settled.reason == "DIGEST_MISSING"
        made.check_cleared(1)


async def test_orders_that_can_not_be_taken_end_neither_the_stream_nor_later_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair("wide", ranks=(1,)) as made:
        program = programs(made.case, Strategy.SLICES)[1]
        for part, reason in (("add_peer", "ORDER_INVALID"), ("load", "INTERNAL")):
            with monkeypatch.context() as patch:
                patch.setattr(Executor, part, failing(ValueError("odd")))
                settled = await made.execute(program, 1, {}, hashed=False)
                assert settled.reason == reason, settled.detail
        assert (await made.execute(program, 2, {}, hashed=False)).reason == ""
        made.check_whole(1)


async def test_an_agent_that_finds_no_room_at_start_leaves_no_memory_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The agent's owner may unmap the memory next, as the daemon does.
    opened: list[NixlTransport] = []
    right = NixlTransport.__init__

    def noted(self: NixlTransport, label: str) -> None:
        right(self, label)
        opened.append(self)

    monkeypatch.setattr(NixlTransport, "__init__", noted)
    monkeypatch.setattr(torch, "zeros", failing(FULL))
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(CopyFailedError, match="out of memory"):
        AsyncAgent(
            "127.0.0.1:1", "E", "life-1", 3, [RegionMemory("r", memory.ctypes.data, 4, 1024)]
        )
    assert len(opened) == 2
    assert not any(one._registered for one in opened)


async def test_regions_at_several_places_are_refused_at_start() -> None:
    # What a device gathers can't be put into the host's staging, nor the other way round.
    memory = np.zeros(4096, np.uint8)
    regions = [
        RegionMemory("kv", 4096, 4, 1024, MemoryKind.CUDA, 0),
        RegionMemory("state", memory.ctypes.data, 4, 1024),
    ]
    with pytest.raises(RegionInvalidError, match="several places: cuda:0, host"):
        AsyncAgent("127.0.0.1:1", "E", "life-1", 3, regions)
