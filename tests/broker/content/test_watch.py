"""`Broker.Watch`: what engines hold, told as it changes, through a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent_harness.waiting import until
from broker.certificates import Authority
from broker.content.holders import FORM, MODEL, PROMPT, heard, hold
from broker.fakes import broker, engine
from broker.guarded import channel_of, guarded, of_tenant, operator, reason_of
from restow.broker.client.connection.channel import open_channel
from restow.broker.errors import NoLeaderError
from restow.broker.server.base import watching
from restow.broker.server.base.standing import Standing
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc


class Watching:
    """What a watcher was told, by engine and group."""

    def __init__(self, call: Any) -> None:
        self._told: AsyncIterator[pb.WatchResponse] = aiter(call)
        self.engines: dict[str, pb.WatchedEngine] = {}
        self.held: dict[str, dict[str, set[bytes]]] = {}
        self.begun = 0

    async def current(self) -> Watching:
        """Hear until the watcher knows what the broker knew."""
        while not await self._hear():
            pass
        return self

    async def _hear(self) -> bool:
        said = await anext(self._told)
        if said.begins:
            self.begun += 1
            self.engines, self.held = {}, {}
        for change in said.changes:
            name, kind = change.engine_id, change.WhichOneof("kind")
            if kind == "began":
                self.engines[name], self.held[name] = change.began, {}
            elif kind == "ended":
                del self.engines[name], self.held[name]
            else:
                run = change.held if kind == "held" else change.evicted
                ours = self.held[name].setdefault(run.group, set())
                hashes = {run.hashes[at : at + 32] for at in range(0, len(run.hashes), 32)}
                ours.difference_update(hashes)
                ours.update(hashes if kind == "held" else ())
        return said.current

    def count(self, name: str) -> dict[str, int]:
        return {group: len(hashes) for group, hashes in self.held.get(name, {}).items() if hashes}


@contextlib.asynccontextmanager
async def watching_at(address: str, **more: Any) -> AsyncIterator[Watching]:
    async with open_channel(address, **more) as channel:
        call = broker_pb2_grpc.BrokerStub(channel).Watch(pb.WatchRequest())
        yield Watching(call)
        call.cancel()


async def test_a_watcher_is_told_what_is_held_and_every_change(running: RunningBroker) -> None:
    async with engine(running.address, "e") as (session, _):
        hold(session)  # before anybody watches: the engine is asked to tell it again
        await heard(running, "e", 2)
        async with watching_at(running.address) as told:
            await told.current()
            while told.count("e") != {"attention": 10, "state": 2}:
                await told.current()
            began = told.engines["e"]
            assert (began.model.name, began.model.revision) == (MODEL.name, MODEL.revision)
            assert began.form.quantum_tokens == 16
            assert {one.group: one.block_tokens for one in began.groups} == {
                "attention": 16,
                "state": 0,
            }
            assert told.held["e"]["attention"] == set(PROMPT.hashes)
            session.evict(FORM, "attention", [PROMPT.hashes[6]])
            await told.current()
            assert told.held["e"]["attention"] == set(PROMPT.hashes) - {PROMPT.hashes[6]}
            async with watching_at(running.address) as late:  # is told a snapshot at once
                await late.current()
                assert late.held == told.held
            await session.close()
            while told.engines:
                await told.current()
            assert told.begun == 1


async def test_a_tenant_is_told_of_its_own_engines_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        guarded(authority) as running,
        engine(running.address, "e", credentials=of_tenant(authority, "a")) as (session, _),
        watching_at(running.address, credentials=operator(authority, "b")) as theirs,
        watching_at(running.address, credentials=operator(authority, "a")) as ours,
    ):
        await ours.current()
        await theirs.current()
        hold(session)
        while ours.count("e") != {"attention": 10, "state": 2}:
            await ours.current()
        assert theirs.engines == {}
        async with channel_of(running.address, authority.client()) as channel:
            stranger = broker_pb2_grpc.BrokerStub(channel).Watch(pb.WatchRequest())
            assert await reason_of(stranger.read()) == "UNAUTHENTICATED"


async def test_watchers_are_limited_and_those_that_leave_make_room(
    running: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_WATCHERS", 2)
    async with watching_at(running.address) as first, watching_at(running.address) as second:
        await first.current()
        await second.current()
        async with open_channel(running.address) as channel:
            third = broker_pb2_grpc.BrokerStub(channel).Watch(pb.WatchRequest())
            assert await reason_of(third.read()) == "QUOTA_EXCEEDED"
    prefixes = running.hub.directory.prefixes
    await until(lambda: not prefixes.logs)  # and nothing is kept for nobody
    async with watching_at(running.address) as again:
        await again.current()


class Stepped(Standing):
    """A leader until it steps down."""

    def check(self) -> None:
        if not self.term:
            raise NoLeaderError("it stepped down")


async def test_a_broker_that_leads_no_longer_ends_the_stream() -> None:
    async with broker() as running, open_channel(running.address) as channel:
        running.hub.standing = standing = Stepped()
        call = broker_pb2_grpc.BrokerStub(channel).Watch(pb.WatchRequest())
        first: Any = await call.read()
        assert first.begins
        standing.term = 0
        assert await reason_of(call.read()) == "NO_LEADER"


async def test_a_broker_that_stops_does_not_wait_for_watchers() -> None:
    async with broker() as running, open_channel(running.address) as channel:
        call = broker_pb2_grpc.BrokerStub(channel).Watch(pb.WatchRequest())
        first: Any = await call.read()
        assert first.current
        running.hub.close()
        assert await asyncio.wait_for(call.read(), 30) is grpc.aio.EOF
