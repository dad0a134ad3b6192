"""Digests of content between real agents over NIXL: what agrees, and what is found to differ."""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from agent_harness.handover import programs
from agent_harness.pair import SETTINGS, pair
from agent_harness.world import POISON
from laws.strategies import SENDING
from restow.agents.binding.extents import Extents
from restow.agents.copying.copier import Hasher
from restow.agents.reading import reader, same_host
from restow.broker.planner import Strategy
from restow.broker.planner.program import READ_PAGES
from restow.v1 import agent_link_pb2 as pb

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("wide", SENDING),
        ("cast", tuple(one for one in SENDING if one is not Strategy.SLICES)),
        ("stages", (Strategy.SLICES, Strategy.PACK)),
        ("shared", SENDING),
        ("recompute", (Strategy.RECOMPUTE, Strategy.PACK)),
    ],
)
async def test_what_arrives_is_what_was_hashed(name: str, strategies: tuple[Strategy, ...]) -> None:
    async with pair(name) as made:
        ways = (programs(made.case, strategy).values() for strategy in strategies)
        for number, program in enumerate(itertools.chain(*ways)):
            await made.check_handoff(program, number, hashed=True)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("wide", one) for one in SENDING if one is not Strategy.AUTO),
        ("cast", Strategy.PACK),
        ("recompute", Strategy.RECOMPUTE),
    ],
)
async def test_one_byte_that_changes_after_it_was_hashed_is_found(
    name: str, strategy: Strategy
) -> None:
    rng = np.random.default_rng(7)
    async with pair(name, ranks=(1,)) as made:
        program = programs(made.case, strategy)[1]
        staged = await made.stage(program, 1, hashed=True)
        number = 0
        for src_rank, answer in staged.items():
            extents = made.read_from(program, src_rank, answer)
            runs = list(zip(extents.address.tolist(), extents.length_bytes.tolist(), strict=True))
            whole = b"".join(ctypes.string_at(address, length) for address, length in runs)
            assert answer.digest == xxhash.xxh3_128_digest(whole)
            for index in {0, len(runs) - 1, *rng.integers(len(runs), size=3).tolist()}:
                number += 1
                address, length = runs[index]
                byte = ctypes.c_ubyte.from_address(address + int(rng.integers(length)))
                before = byte.value
                byte.value ^= 1 << int(rng.integers(8))
                settled = await made.execute(program, number, staged)
                assert settled.reason == "DIGEST_MISMATCH", (src_rank, index)
                assert f"rank {src_rank}" in settled.detail
                assert not settled.compared
                made.check_cleared(1)
                if not len(program.rows(READ_PAGES)):
                    made.check_untouched(1)
                byte.value = before
                assert (await made.execute(program, -number, staged)).reason == ""
                made.check_whole(1)


async def test_reads_that_threads_share_out_are_hashed_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "LARGE_BYTES", 1)
    monkeypatch.setattr(same_host, "THREAD_BYTES", 4096)
    settings = replace(SETTINGS, read_threads=3)
    threads: set[int] = set()
    right = Hasher._digest

    def noted(self: Hasher, extents: Extents) -> bytes:
        threads.add(threading.get_ident())
        return right(self, extents)

    monkeypatch.setattr(Hasher, "_digest", noted)
    async with pair("big", ranks=(0,), settings=settings) as made:
        for number, strategy in enumerate((Strategy.SLICES, Strategy.WHOLE, Strategy.PACK) * 2):
            await made.check_handoff(programs(made.case, strategy)[0], number, hashed=True)
    assert threading.get_ident() not in threads, "much is hashed on the event loop"


async def test_a_digest_that_is_missing_or_short_is_not_passed_over() -> None:
    async with pair("wide", ranks=(0,)) as made:
        program = programs(made.case, Strategy.SLICES)[0]
        staged = await made.stage(program, 1, hashed=True)
        for number, digest in enumerate((b"", b"short", bytes(17))):
            answers = {rank: pb.Staged(digest=digest) for rank in staged}
            settled = await made.execute(program, number, answers)
            assert settled.reason == "DIGEST_MISSING", settled.detail
            made.check_cleared(0)
        settled = await made.execute(
            program, 9, {rank: pb.Staged(digest=bytes(16)) for rank in staged}
        )
        assert settled.reason == "DIGEST_MISMATCH"


async def test_the_digest_of_another_rank_does_not_do() -> None:
    async with pair("stages") as made:
        found = 0
        for program in programs(made.case, Strategy.SLICES).values():
            if len(program.src_ranks) < 2:
                continue
            staged = await made.stage(program, program.dst_rank, hashed=True)
            first, second, *_ = staged
            turned = {**staged, first: staged[second], second: staged[first]}
            settled = await made.execute(program, program.dst_rank, turned)
            assert settled.reason == "DIGEST_MISMATCH"
            found += 1
        assert found


async def test_hashing_needs_no_staging_and_saying_it_again_changes_nothing() -> None:
    async with pair("wide", ranks=(0,), settings=replace(SETTINGS, staging_bytes=0)) as made:
        program = programs(made.case, Strategy.SLICES)[0]
        first = await made.stage(program, 1, hashed=True)
        assert all(len(one.digest) == 16 and one.bytes == 0 for one in first.values())
        assert await made.stage(program, 1, hashed=True) == first
        assert (await made.execute(program, 1, first)).reason == ""
        made.check_whole(0)
        # Given back, it is made anew, of what is there then.
        for rank in first:
            source = await made.fake.agent("P", rank)
            source.send(pb.AgentOrder(unstage=pb.Unstage(handoff=1)))
            made.source[rank].data[:] = POISON
        again = await made.stage(program, 1, hashed=True)
        assert all(again[rank].digest != first[rank].digest for rank in first)
        # A stream that broke leaves nothing behind either.
        stream = made.fake.streams.pop(("P", rank))
        made.source[rank].data[:] ^= 1
        stream.end()
        await made.fake.agent("P", rank)
        anew = await made.stage(program, 1, hashed=True)
        assert anew[rank].digest != again[rank].digest


async def test_digests_of_a_kind_that_is_not_known_are_refused() -> None:
    async with pair("wide", ranks=(0,)) as made:
        source = await made.fake.agent("P", 0)
        source.send(
            pb.AgentOrder(stage=pb.Stage(handoff=1, parts=[pb.StagePart(dst_rank=4)], digest=7))  # type: ignore[arg-type]
        )
        refused = await source.next()
        assert (refused.dst_rank, refused.reason) == (4, "ORDER_INVALID")
        destination = await made.fake.agent("D", 0)
        destination.send(pb.AgentOrder(execute=pb.Execute(handoff=2, digest=7)))  # type: ignore[arg-type]
        assert (await destination.next()).reason == "ORDER_INVALID"


async def test_what_nobody_asked_to_hash_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Hasher, extents: Extents) -> bytes:
        raise AssertionError("hashed unasked")

    monkeypatch.setattr(Hasher, "_digest", never)
    async with pair("wide", ranks=(0,)) as made:
        for number, strategy in enumerate((Strategy.SLICES, Strategy.PACK)):
            program = programs(made.case, strategy)[0]
            staged = await made.stage(program, number)
            assert not any(one.digest for one in staged.values())
            await made.check_handoff(program, number + 10)
