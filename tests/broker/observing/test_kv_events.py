"""KV events of a real broker, over real sockets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from broker.content.holders import FORM, PROMPT, heard, hold
from broker.fakes import broker, engine
from broker.observing.subscribers import Subscriber, numbers, subscriber
from forked.ports import free_port
from restow.broker.errors import ExtraMissingError, ListenError
from restow.broker.server.base.standing import Standing
from restow.broker.server.observe import kv_events


def addresses(folder: Path) -> dict[str, Any]:
    return {
        "kv_events": f"ipc://{folder}/events",
        "kv_events_replay": f"ipc://{folder}/replays",
    }


async def all_told(told: Subscriber, count: int) -> list[Any]:
    """Return the first ``count`` messages, as a subscriber that comes late asks for them."""
    messages: list[Any] = []
    while len(messages) < count:
        messages = await told.replay(0)
    return messages


async def test_what_an_engine_holds_is_published_and_replayed(tmp_path: Path) -> None:
    where = addresses(tmp_path)
    async with (
        broker(**where) as running,
        engine(running.address, "e") as (session, _),
        subscriber(where["kv_events"], where["kv_events_replay"]) as told,
    ):
        hold(session)
        await heard(running, "e", 2)
        messages = await all_told(told, 2)
        topic = messages[0].topic
        events = [event for message in messages for event in message.events]
        assert [message.sequence for message in messages] == list(range(len(messages)))
        assert [event["type"] for event in events] == ["AllBlocksCleared"] + 4 * ["BlockStored"]
        assert events[3]["block_hashes"] == numbers(PROMPT.hashes)
        assert [event.get("kv_cache_spec_kind") for event in events[3:]] == [
            "full_attention",
            "mamba",
        ]
        # A subscriber hears what comes from then on, in one sequence.
        session.evict(FORM, "attention", [PROMPT.hashes[6]])
        now = await told.hear()
        while now.kinds != ["BlockRemoved"]:
            now = await told.hear()
        assert (now.topic, now.sequence) == (topic, messages[-1].sequence + 1)
        assert now.events[0]["block_hashes"] == numbers([PROMPT.hashes[6]])
        assert await told.replay(now.sequence, topic.encode()) == [now]
        assert await told.replay(now.sequence + 1) == []
        assert await told.replay(0, b"kv@other") == []
        for frames in ((), (b"",), (b"", b"123"), (b"", b"12345678", b"", b""), (b"x" * 9000,)):
            await told.send(*frames) if frames else None  # nobody's request
        await session.close()
        assert (await told.hear()).kinds == ["AllBlocksCleared"]


async def test_what_replays_lack_is_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT", 2)
    monkeypatch.setattr(kv_events, "ANNOUNCE_EVERY_S", 0.01)
    where = addresses(tmp_path)
    async with (
        broker(**where) as running,
        engine(running.address, "e") as (session, _),
        subscriber(where["kv_events"], where["kv_events_replay"]) as told,
    ):
        hold(session)
        for place in range(6, 10):
            session.evict(FORM, "attention", [PROMPT.hashes[place]])
            await heard(running, "e", place - 3)
        lacking = await told.replay(0)
        while len(lacking) < 3:
            lacking = await told.replay(0)
        assert lacking[0].kinds[0] == "AllBlocksCleared"
        while (again := await told.hear()).kinds.count("BlockStored") < 4:
            pass
        assert again.kinds[0] == "AllBlocksCleared"
        assert sorted(len(one["block_hashes"]) for one in again.events[1:]) == [0, 0, 2, 6]


class Doubtful(Standing):
    """A leader that is not sure to lead."""

    sure_now = False

    def is_sure(self) -> bool:
        return self.sure_now


async def test_a_broker_publishes_only_while_it_leads(tmp_path: Path) -> None:
    where = addresses(tmp_path)
    async with (
        broker(**where) as running,
        engine(running.address, "e") as (session, _),
        subscriber(where["kv_events"], where["kv_events_replay"]) as told,
    ):
        hold(session)
        assert (await all_told(told, 1))[0].kinds[0] == "AllBlocksCleared"
        running.hub.standing = standing = Doubtful()
        await heard(running, "e", 2)
        last = (await told.replay(0))[-1].sequence
        session.evict(FORM, "attention", [PROMPT.hashes[6]])
        # It hears the engine, and says nothing until it is sure.
        standing.term = 0
        assert await told.replay(0) == []
        standing.term, standing.sure_now = 1, True
        while not (messages := await told.replay(last + 1)) or "BlockRemoved" not in [
            kind for one in messages for kind in one.kinds
        ]:
            pass


async def test_events_go_to_a_subscriber_that_listens(tmp_path: Path) -> None:
    replays, listens = f"ipc://{tmp_path}/replays", f"tcp://127.0.0.1:{free_port()}"
    async with (
        subscriber(listens, replays, listens=True) as told,
        broker(kv_events=listens, kv_events_replay=replays) as running,
        engine(running.address, "e") as (session, _),
    ):
        while not await told.has_news():
            hold(session)
            session.evict(FORM, "attention", PROMPT.hashes)
        assert (await told.hear()).topic.startswith("kv@e@")


async def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="KV events can't be published at ipc://"):
        async with broker(kv_events=f"ipc://{tmp_path}/no/such/folder"):
            pass


async def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "restow.broker.server.observe.kv_events", raising=False)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ExtraMissingError, match=r"msgspec.*restow\[events\]"):
        async with broker(kv_events="tcp://*:0"):
            pass
